"""``python -m benchmarks.drafts``: counts the tokens that drafters save on recorded texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafts import demanded
from benchmarks.drafts.command import main
from benchmarks.drafts.texts import TurnKind, kind_of

CODE = "\n".join(f"value_{i} = compute(value_{i - 1}, offset={i * 17 % 31})" for i in range(1, 30))


def turn(told: str, said: str) -> dict[str, object]:
    counts = {"input_tokens": 10, "prefix_tokens": 0, "output_tokens": 10}
    return {**counts, "gap_kind": "tool", "input_text": told, "output_text": said}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of a job that reads a file and writes it back, and of a second job with the same texts."""
    turns = [
        turn("Change the file.", "I read it.\n\n```bash\ncat values.py\n```"),
        turn(CODE, f"I write it.\n\n```bash\ncat > values.py <<'EOF'\n{CODE}\nEOF\n```"),
        {**turn("", "Done."), "gap_kind": "end"},
    ]
    jobs = [{"job_id": name, "source": "made", "system_text": "You act.", "turns": turns} for name in "ab"]
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return path


def test_a_job_that_writes_back_what_it_read(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drafting from the job's own text saves steps; counts add up and are the same in two runs."""
    out = recording.with_name("out.json")
    found = []
    for _ in range(2):
        assert main([str(recording), "--all", "--json", str(out)]) == 0
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1]
    assert "met: write or edit" in capsys.readouterr().out
    rows = {(row["drafter"], row["turns"]): row for row in found[0]}
    assert {kind for _, kind in rows} == {"write or edit", "command", "text", "all"}
    for row in rows.values():
        assert row["steps"] + row["accepted"] == row["tokens"]
        assert sum(steps for _, _, steps in row["steps_by_drafts"]) == row["steps"]
        assert sum(accepted * steps for _, accepted, steps in row["steps_by_drafts"]) == row["accepted"]
    assert len({row["tokens"] for (_, kind), row in rows.items() if kind == "all"}) == 1
    assert rows["no drafts", "all"]["accepted"] == 0
    with_both, alone = rows["suffix, job and kind", "all"], rows["suffix, job alone", "all"]
    assert with_both["steps"] < alone["steps"] < rows["no drafts", "all"]["steps"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Now:\n```bash\nsed -i 's/a/b/' f.py\n```", TurnKind.WRITE),
        ("Now:\n```bash\ncat > f.py\n```", TurnKind.WRITE),
        ("Now:\n```bash\nls -la | head\n```", TurnKind.COMMAND),
        ("I would write << here, but do not.", TurnKind.TEXT),
    ],
)
def test_the_kind_of_a_turn(said: str, kind: TurnKind) -> None:
    """The shell command decides the kind of a turn, not the words around it."""
    assert kind_of(said) is kind


def test_a_tokenizer_that_is_not_there_is_named(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing tokenizer is refused with a sentence that names it."""
    assert main([str(recording), "--tokenizer", "nowhere"]) == 2
    assert "nowhere is no folder of a tokenizer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_demanded_calls_take_fewer_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model's calls are the same with each drafter; grammar saves steps, and suffix more."""
    monkeypatch.setattr(demanded, "METHODS", (demanded.NO_DRAFTS, "grammar", "suffix"))
    assert demanded.main() == 0
    told = capsys.readouterr().out
    assert "10 calls, the same with every drafter" in told
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines()[2:5]]
    assert [name for name, *_ in rows] == [*demanded.METHODS]
    counts = [[int(cell) for cell in cells] for _, *cells in rows]
    for tokens, steps, drafted, accepted in counts:
        assert tokens == counts[0][0] == steps + accepted
        assert accepted <= drafted
    plain, grammar, suffix = (steps for _, steps, _, _ in counts)
    assert suffix < grammar < plain
