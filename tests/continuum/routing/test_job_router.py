"""Promises of the router: a job has one home, all processes agree on it, and it moves only if that pays."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from continuum.routing.home_table import CHUNK_TOKENS, HomeTable, beginnings, key_of
from continuum.routing.job_router import LONGEST_RETURN_S, MAX_JOBS, JobRouter
from engine.routing import EngineLoad, LeastLoadedRouter, RoutedTurn, RouterContext

BLOCK_SIZE = 16


def table(num_words: int = 1 << 16) -> memoryview:
    return memoryview(array("Q", bytes(8 * num_words)))


def router(num_engines: int = 4, words: memoryview | None = None) -> JobRouter:
    return JobRouter(RouterContext(num_engines, BLOCK_SIZE, table() if words is None else words))


def idle(num_engines: int = 4, num_blocks: int = 10_000) -> list[EngineLoad | None]:
    return [EngineLoad(num_blocks=num_blocks, num_free_blocks=num_blocks) for _ in range(num_engines)]


def turn(tokens: list[int], job_id: str | None = None, **fields: str) -> RoutedTurn:
    return RoutedTurn(f"request-{len(tokens)}", tokens, job_id=job_id, **fields)


def text(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + position * 31) % 50_021 for position in range(length)]


def test_a_named_job_stays_at_home() -> None:
    jobs = router()
    homes = {name: jobs.place(turn(text(name, 900), f"job-{name}"), idle(), 0.0) for name in range(40)}
    assert len(set(homes.values())) == 4
    for name, home in homes.items():
        assert jobs.place(turn(text(name, 1500), f"job-{name}"), idle(), 1.0) == home


def test_a_sub_agent_goes_where_its_parent_is() -> None:
    """Also if its prompt begins like that of a job elsewhere, but not where others would be much sooner."""
    jobs = router()
    homes = {name: jobs.place(turn(text(name, 900), f"job-{name}"), idle(), 0.0) for name in range(40)}
    for name, home in homes.items():
        child = turn(text((name + 1) % 40, 1200), f"child-{name}", parent_id=f"job-{name}")
        assert jobs.place(child, idle(), 1.0) == home
        assert jobs.place(turn(text(name, 1500), f"child-{name}"), idle(), 2.0) == home
    loads = idle()
    loads[homes[0]] = EngineLoad(num_open=20, num_blocks=10_000, num_free_blocks=100)
    assert jobs.place(turn(text(99, 90), "late", parent_id="job-0"), loads, 3.0) != homes[0]


def test_a_named_job_stays_at_home_though_others_fill_the_table() -> None:
    """With a shared table of 4,096 words and 300 jobs of 62 chunks each, every named job stays at its
    home."""
    jobs = router(words=table(4096))
    homes = {name: jobs.place(turn(text(name, 4000), f"job-{name}"), idle(), 0.0) for name in range(300)}
    for name, home in homes.items():
        assert jobs.place(turn(text(name, 4100), f"job-{name}"), idle(), 1.0) == home


def test_an_unnamed_job_is_known_by_its_prompt() -> None:
    jobs = router()
    homes = {name: jobs.place(turn(text(name, 900)), idle(), 0.0) for name in range(40)}
    for name, home in homes.items():
        longer = text(name, 900) + text(name + 1000, 400)
        assert jobs.place(turn(longer), idle(), 1.0) == home


def test_a_sub_agent_with_its_parents_prefix_is_near_it() -> None:
    jobs = router()
    for name in range(20):
        home = jobs.place(turn(text(name, 2000), f"parent-{name}"), idle(), 0.0)
        child = text(name, 1500) + text(name + 500, 300)
        assert jobs.place(turn(child, f"child-{name}"), idle(), 1.0) == home


def test_tenants_are_not_sent_by_what_others_have() -> None:
    """The same prompt with another owner or salt counts as another prompt."""
    for other in ({"owner": "b"}, {"cache_salt": "s"}):
        shared, apart = 0, 0
        for name in range(60):
            jobs = router()
            home = jobs.place(turn(text(name, 640), owner="a"), idle(), 0.0)
            shared += jobs.place(turn(text(name, 700), owner="a"), idle(), 1.0) == home
            apart += jobs.place(turn(text(name, 700), **other), idle(), 1.0) == home
        assert shared == 60
        assert apart < 40


def test_routers_of_several_processes_agree() -> None:
    """Routers agree through their shared table: the second has seen none of the jobs."""
    words = table()
    one, two = router(words=words), router(words=words)
    for name in range(40):
        home = one.place(turn(text(name, 900), f"job-{name}"), idle(), 0.0)
        assert two.place(turn(text(name, 1200), f"job-{name}"), idle(), 1.0) == home


def test_new_jobs_go_to_the_same_core_without_a_shared_table() -> None:
    """With equal loads, the key alone chooses."""
    one, two = router(), router()
    for name in range(20):
        new = turn(text(name, 100), f"job-{name}")
        assert one.place(new, idle(num_blocks=10**6), 0.0) == two.place(new, idle(num_blocks=10**6), 0.0)


def test_keys_are_the_same_in_every_process() -> None:
    said = (
        "from continuum.routing.home_table import beginnings, key_of;"
        "print(key_of('owner', None), *beginnings(list(range(300)), 5))"
    )
    told = {
        subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert told == {" ".join(map(str, [key_of("owner", None), *beginnings(list(range(300)), 5)])) + "\n"}


def test_a_job_moves_from_a_full_home_and_stays_there() -> None:
    jobs = router(2)
    home = jobs.place(turn(text(1, 4000), "job"), idle(2), 0.0)
    loads = idle(2)
    busy = loads[home]
    assert busy is not None
    busy.num_waiting = busy.num_open = 3
    assert jobs.place(turn(text(1, 4500), "job"), loads, 1.0) == home  # recomputing takes longer
    busy.num_waiting = busy.num_open = 300
    away = jobs.place(turn(text(1, 5000), "job"), loads, 2.0)
    assert away != home
    assert jobs.place(turn(text(1, 5500), "job"), idle(2), 3.0) == away


def test_a_job_finds_a_better_home_among_a_thousand_cores() -> None:
    """The router looks at only some of the cores; most are idle, so it finds an idle one."""
    jobs = router(1000)
    full = EngineLoad(num_open=60, num_running=8, num_waiting=52, num_blocks=10_000, num_free_blocks=10)
    home = jobs.place(turn(text(1, 9000), "job"), idle(1000), 0.0)
    loads = idle(1000)
    loads[home] = full
    moved = jobs.place(turn(text(1, 9100), "job"), loads, 1.0)
    assert moved != home
    assert jobs.place(turn(text(1, 9200), "job"), loads, 2.0) == moved


def test_a_lost_core_is_no_home() -> None:
    jobs = router(2)
    homes = {name: jobs.place(turn(text(name, 900), f"job-{name}"), idle(2), 0.0) for name in range(20)}
    jobs.lost(0)
    loads: list[EngineLoad | None] = [None, idle(1)[0]]
    for name in homes:
        assert jobs.place(turn(text(name, 1000), f"job-{name}"), loads, 1.0) == 1
    for name in homes:  # The jobs do not return when it does.
        assert jobs.place(turn(text(name, 1100), f"job-{name}"), idle(2), 2.0) == 1


def test_new_jobs_go_where_least_is_held() -> None:
    """Pinned blocks count as load, and so do jobs that are expected back."""
    jobs = router(2)
    full = EngineLoad(num_blocks=1000, num_free_blocks=100, num_pinned_blocks=900)
    free = EngineLoad(num_blocks=1000, num_free_blocks=1000)
    for name in range(10):
        assert jobs.place(turn(text(name, 100), f"small-{name}"), [full, free], 0.0) == 1
    jobs = router(2)
    first = jobs.place(turn(text(1, 9000), "large"), idle(2, 1000), 0.0)
    second = jobs.place(turn(text(2, 9000), "other"), idle(2, 1000), 1.0)
    assert first != second


def test_memory_is_bounded() -> None:
    jobs = router(2, table(1 << 12))
    for name in range(MAX_JOBS + 100):
        jobs.place(turn([name], f"job-{name}"), idle(2), 0.0)
    assert len(jobs._jobs) == MAX_JOBS
    jobs.place(turn([1], "later"), idle(2), LONGEST_RETURN_S + 1)
    assert len(jobs._jobs) == MAX_JOBS
    assert sum(jobs._expected) == len(jobs._active) == 1


def test_jobs_that_all_begin_alike_are_spread() -> None:
    """Agents of one kind share a long system prompt; the cores get equal numbers of jobs all the same."""
    jobs, system = router(), text(0, 2000)
    homes = Counter(
        jobs.place(turn(system + text(name, 4000), f"job-{name}"), idle(), 0.0) for name in range(200)
    )
    assert max(homes.values()) <= min(homes.values()) + 2


def test_turns_of_an_unnamed_job_count_once() -> None:
    jobs, prompt = router(), text(1, 3000)
    for number in range(5):
        jobs.place(turn(prompt), idle(), float(number))
        assert sum(jobs._expected) == len(prompt)
        prompt = prompt + text(number + 5, 700)


def test_who_stays_away_for_longer_than_most_is_no_longer_counted() -> None:
    """A job stops counting once it is away longer than most jobs, as soon as return times are known."""
    jobs = router()
    for number in range(400):
        jobs.place(turn(text(1, 640 + number), "busy"), idle(), 200.0 * number)
        if number == 0:
            jobs.place(turn(text(2, 640), "gone"), idle(), 1.0)
    now = 200.0 * 399
    jobs.place(turn(text(3, 640), "away"), idle(), now + 1)
    jobs.place(turn(text(1, 1200), "busy"), idle(), now + 150)
    assert sum(jobs._expected) == 640 + 1200
    jobs.place(turn(text(1, 1300), "busy"), idle(), now + LONGEST_RETURN_S + 2)
    assert sum(jobs._expected) == 1300


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 400), st.booleans(), st.sampled_from(["", "lost", "ended"])
        ),
        max_size=40,
    ),
    st.sets(st.integers(0, 2), max_size=2),
)
def test_only_cores_that_take_requests_are_chosen(
    events: list[tuple[int, int, bool, str]], down: set[int]
) -> None:
    """Only available cores are chosen, for any sequence of events; expected tokens are never negative."""
    jobs, plain = router(3, table(1 << 12)), LeastLoadedRouter(RouterContext(3, BLOCK_SIZE, table(1 << 12)))
    loads = [None if engine in down else load for engine, load in enumerate(idle(3))]
    for now, (name, length, named, then) in enumerate(events):
        arrived = turn(text(name, length), f"job-{name}" if named else None)
        for each in (jobs, plain):
            assert each.place(arrived, loads, float(now)) not in down
        if then == "lost":
            jobs.lost(name % 3)
        elif then == "ended":
            jobs.job_ended(f"job-{name}")
        assert min(jobs._expected) >= 0
        assert sum(jobs._expected) == sum(job.num_tokens for job in jobs._jobs.values())


@given(st.dictionaries(st.integers(0, 2**64 - 1), st.integers(0, 1023), max_size=50))
def test_the_table_never_tells_of_another_key(homes: dict[int, int]) -> None:
    """An overwritten key is unknown; a known key has the engine that was stored for it."""
    words = HomeTable(table(1 << 12))
    for key, engine in homes.items():
        words[key] = engine
    for key, engine in homes.items():
        assert words[key] in (engine, None)
    words.forget(3)
    assert all(words[key] is None for key, engine in homes.items() if engine == 3)


def test_beginnings_go_on_where_they_are_known() -> None:
    tokens = text(1, 10 * CHUNK_TOKENS + 5)
    whole = list(beginnings(tokens, 9))
    assert len(whole) == 10
    assert list(beginnings(tokens, 9, known=4, known_key=whole[3])) == whole[4:]


def test_v1s_balancer_takes_the_shortest_queue_and_rotates_ties() -> None:
    plain = LeastLoadedRouter(RouterContext(3, BLOCK_SIZE, table(1 << 12)))
    assert [plain.place(turn([1]), idle(3), 0.0) for _ in range(4)] == [0, 1, 2, 0]
    loads = [EngineLoad(num_waiting=1), EngineLoad(num_running=3), EngineLoad(num_running=5)]
    assert plain.place(turn([1]), loads, 0.0) == 1
