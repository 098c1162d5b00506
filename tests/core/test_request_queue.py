"""The waiting queue keeps its order when requests are added, re-keyed, set aside and removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.request_queue import RequestQueue
from engine.records.sampling_params import SamplingParams


def request(number: int) -> Request:
    return Request(f"r{number}", [1], SamplingParams(max_tokens=1), 0.0)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "late", "prepend", "rekey", "remove", "pop", "aside"]), st.integers(0, 2)
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_equals_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    """For any operations the queue pops like a list sorted by (key, place)."""
    queue = RequestQueue()
    model: list[tuple[int, int, Request]] = []
    late = request(-1), 0
    queue.keep_place(late[0])
    for number, (operation, key) in enumerate(operations, start=1):
        if operation == "late":
            model.append((key, late[1], late[0]))
            queue.add(late[0], (key,))
            late = request(1000 + number), number
            queue.keep_place(late[0])
        elif operation in ("add", "prepend"):
            new = request(number)
            getattr(queue, operation)(new, (key,))
            model.append((key, number if operation == "add" else -number - 1, new))
        elif model:
            model.sort(key=lambda item: item[:2])
            place, item = model[0][1], model[-1]
            if operation == "rekey":
                queue.rekey(item[2], (key,))
                model[-1] = (key, item[1], item[2])
            elif operation == "remove":
                queue.remove(item[2])
                model.pop()
            elif operation == "pop":
                assert queue.pop() is model.pop(0)[2], place
            else:
                queue.put_back(queue.set_aside())
    model.sort(key=lambda item: item[:2])
    assert set(queue) == {item[2] for item in model}
    assert len(queue) == len(model)
    for found, item in zip(queue.first(3), model, strict=False):
        assert found is item[2] or len(operations) > len(model)
    assert [queue.pop() for _ in model] == [item[2] for item in model]
    assert queue.peek() is None
