"""Promises of ``continuum trace report``: a page that shows a trace and works by mouse and keyboard."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from continuum.cli.main import main
from tests.browser.conftest import WINDOW, save_screenshot

pytestmark = pytest.mark.slow

EVIL_JOB = "<script>window.taken = 1</script>\"'&</td><img src=x onerror='window.taken = 1'>"
EVIL_TOOL = '<img src=x onerror="window.taken = 1">'
TAMED_TOOL = "_img_src=x_onerror=_window.taken"
"""The policy's sanitized name of EVIL_TOOL; a trace from another writer may hold the original."""
NUM_JOBS = 14
NUM_TURNS = 10
AA_CONTRAST = 4.5
"""Minimum contrast of text to its background: WCAG 2.2, level AA."""


def make_workload(path: Path) -> None:
    """Writes jobs whose prompts grow; one has an id and a tool that would be markup if not escaped."""
    draw = random.Random(4)
    with path.open("w") as file:
        for number in range(NUM_JOBS):
            job_id = EVIL_JOB if number == 0 else f"fleet/team-{number % 3}/job-{number:02}"
            job = {
                "job_id": job_id,
                "source": "hand-made",
                "group": f"g{number}",
                "turns": _turns(draw, number),
            }
            print(json.dumps(job), file=file)


def _turns(draw: random.Random, job: int) -> list[dict[str, object]]:
    turns: list[dict[str, object]] = []
    known, prompt = 0, draw.randrange(600, 1000)
    for number in range(NUM_TURNS):
        output = draw.randrange(20, 160)
        turn = {"input_tokens": prompt, "prefix_tokens": known, "output_tokens": output, "gap_kind": "end"}
        if number < NUM_TURNS - 1:
            tool = EVIL_TOOL if job == 0 else draw.choice(["Bash", "Read", "Grep"])
            turn |= {"gap_kind": "tool", "tool": tool, "tool_s": round(draw.lognormvariate(0, 1.3), 3)}
        turns.append(turn)
        known = prompt + output
        prompt = known + draw.randrange(100, 900)
    return turns


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the real scheduler and policy with scarce memory: pins break, requests are preempted."""
    folder = tmp_path_factory.mktemp("trace")
    make_workload(folder / "jobs.jsonl")
    trace = folder / "trace.jsonl"
    command = ["simulate", "--workload", str(folder / "jobs.jsonl"), "--kv-tokens", "16000", "--rate", "1"]
    assert main([*command, "--policies", "continuum", "--trace", str(trace)]) == 0
    text = trace.read_text()
    assert TAMED_TOOL in text
    trace.write_text(text.replace(TAMED_TOOL, json.dumps(EVIL_TOOL)[1:-1]))
    return trace


@pytest.fixture(scope="module")
def report(trace: Path) -> Path:
    out = trace.with_name("made") / "report.html"
    assert main(["trace", "report", str(trace), "--out", str(out)]) == 0
    return out


@pytest.fixture
def shown(page: Page, report: Path) -> Page:
    """The report, open in a browser and rendered."""
    return open_page(page, report)


def open_page(page: Page, report: Path) -> Page:
    page.goto(report.as_uri())
    expect(page.locator("#job-table tbody tr")).to_have_count(NUM_JOBS)
    return page


def centre(part: Locator, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
    """A point of the visible part of an element, in the window's pixels."""
    part.scroll_into_view_if_needed()
    box = part.bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def seen_seconds(page: Page) -> float:
    """The length of the time range that the charts show."""
    return float(page.evaluate("timeWindow.max - timeWindow.min"))


def test_a_trace_becomes_one_page_with_all_of_it(shown: Page) -> None:
    """The page has figures, lanes, pool, queue, grants, and a line per job and tool; it contacts no host."""
    expect(shown.locator("h1")).to_have_text("trace.jsonl")
    expect(shown.locator(".figures > div")).to_have_count(10)
    expect(shown.locator(".figures")).to_contain_text(f"{NUM_JOBS * NUM_TURNS} turns")
    for chart in ("gantt", "pool", "queue", "scatter"):
        assert not is_blank(shown, chart), f"nothing is drawn in {chart}"
    expect(shown.locator("#pool-legend li")).to_have_text(
        ["running", re.compile("^pinned"), re.compile("^cached"), "free"]
    )
    expect(shown.locator("#gantt-legend")).to_contain_text("waiting for memory")
    assert shown.locator("#tool-table tbody tr").count() >= 4
    save_screenshot(shown, "report-light")


def is_blank(page: Page, chart: str) -> bool:
    """Whether the chart's canvas has fewer than four colors."""
    colours = page.evaluate(
        """chart => {
            const canvas = document.querySelector(`#${chart} canvas`);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        chart,
    )
    return int(colours) < 4


def test_text_of_strangers_stays_text(shown: Page) -> None:
    """Job ids and tool names come from clients: wherever they are shown, they are only text."""
    shown.get_by_role("button", name=EVIL_JOB[:12]).click()
    expect(shown.locator("#life-title")).to_have_text(EVIL_JOB)
    shown.locator("#life").get_by_role("button", name="Turn 1: why").click()
    shown.locator("#life .track").first.hover()
    expect(shown.locator("#tip")).to_contain_text("Turn 1")
    shown.keyboard.press("Escape")
    assert shown.locator("#tool-table, #job-table").locator("img, script").count() == 0
    assert shown.evaluate("typeof window.taken") == "undefined"
    assert shown.locator("#tool-table").inner_text().count("<img") >= 1, "the tool's name is there to be read"


def test_a_page_runs_no_script_but_its_own(shown: Page, page_errors: list[str]) -> None:
    """Markup that got in would not run: the page's content security policy forbids it."""
    shown.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.taken = 1\">')"
    )
    expect(shown.locator("body > img")).to_have_count(1)
    shown.wait_for_function("document.querySelector('body > img').complete")
    assert shown.evaluate("typeof window.taken") == "undefined"
    assert any("Content Security Policy" in error for error in page_errors)
    page_errors.clear()


def test_a_drag_zooms_all_charts_and_a_double_click_shows_all_again(shown: Page) -> None:
    """A drag zooms all charts to one time range; a double click shows all again."""
    whole_s = seen_seconds(shown)
    drag(shown, shown.locator("#pool .u-over"), 0.4, 0.6)
    assert seen_seconds(shown) == pytest.approx(0.2 * whole_s, rel=0.03)
    shown.locator("#queue .u-over").dblclick()
    assert seen_seconds(shown) == pytest.approx(whole_s)


def test_lanes_are_of_the_jobs_that_were_there(shown: Page) -> None:
    """Lanes of jobs outside the visible range take no space, and the page says that they are hidden."""
    shown.evaluate("timeWindow.set(0, 2)")
    expect(shown.locator("#job-count")).to_have_text(re.compile(rf"^[1-5] of {NUM_JOBS} in this stretch"))
    shown.get_by_role("button", name="All", exact=True).click()
    expect(shown.locator("#job-count")).to_have_text(f"{NUM_JOBS} jobs")


def test_shift_and_a_drag_move_in_time(shown: Page) -> None:
    """Shift and a drag move the range and keep its length."""
    drag(shown, shown.locator("#gantt .u-over"), 0.4, 0.6)
    began_s, length_s = shown.evaluate("timeWindow.min"), seen_seconds(shown)
    shown.keyboard.down("Shift")
    drag(shown, shown.locator("#gantt .u-over"), 0.5, 0.7)
    shown.keyboard.up("Shift")
    assert seen_seconds(shown) == pytest.approx(length_s)
    assert shown.evaluate("timeWindow.min") == pytest.approx(began_s - 0.2 * length_s, rel=0.03)
    expect(shown.locator("#life")).not_to_be_visible()


def drag(page: Page, part: Locator, from_share: float, to_share: float) -> None:
    x, y = centre(part, from_share)
    page.mouse.move(x, y)
    page.mouse.down()
    x, y = centre(part, to_share)
    page.mouse.move(x, y, steps=5)
    page.mouse.up()


def test_the_wheel_zooms_with_control_and_scrolls_without(shown: Page) -> None:
    """The wheel zooms only with Control, so that scrolling past a chart works."""
    whole_s = seen_seconds(shown)
    shown.mouse.move(*centre(shown.locator("#pool .u-over")))
    shown.mouse.wheel(0, 200)
    assert seen_seconds(shown) == pytest.approx(whole_s)
    shown.mouse.move(*centre(shown.locator("#pool .u-over")))
    shown.keyboard.down("Control")
    shown.mouse.wheel(0, -200)
    shown.keyboard.up("Control")
    shown.wait_for_function("whole => timeWindow.max - timeWindow.min < 0.8 * whole", arg=whole_s)


def test_buttons_and_keys_move_in_time(shown: Page) -> None:
    """Buttons and keys zoom and move, so that no mouse is needed."""
    whole_s = seen_seconds(shown)
    shown.get_by_role("button", name="Zoom in").click()
    assert seen_seconds(shown) == pytest.approx(whole_s / 2)
    shown.locator("#pool").focus()
    shown.keyboard.press("+")
    shown.keyboard.press("ArrowRight")
    assert seen_seconds(shown) == pytest.approx(whole_s / 4)
    assert shown.evaluate("timeWindow.min") == pytest.approx(whole_s * (3 / 8 + 1 / 16))
    shown.keyboard.press("0")
    assert seen_seconds(shown) == pytest.approx(whole_s)


def test_hovering_tells_what_is_there(shown: Page) -> None:
    """Hovering shows a lane's job and phase, the pool's blocks by kind, and the queue's requests."""
    tip = shown.locator("#tip")
    shown.mouse.move(*centre(shown.locator("#pool .u-over")))
    expect(tip).to_be_visible()
    expect(tip).to_contain_text(re.compile(r"running.*[\d,]+ blocks?, \d.*%", re.DOTALL))
    shown.mouse.move(*centre(shown.locator("#queue .u-over")))
    expect(tip).to_contain_text("most queued at once")
    shown.mouse.move(*lane_point(shown, "fleet/team-1/job-07"))
    expect(tip).to_contain_text("fleet/team-1/job-07")
    expect(tip).to_contain_text(re.compile(r"turn.*\d+ of 10", re.DOTALL))
    shown.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def lane_point(page: Page, job_id: str) -> tuple[float, float]:
    """The middle of the first tile of a job's lane."""
    page.locator("#gantt").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """id => {
            const index = gantt.lanes.findIndex((job) => job.job_id === id);
            const [tile] = gantt.lanes[index].tiles.filter((one) => one.kind === "decode");
            const box = gantt.chart.over.getBoundingClientRect();
            return [box.left + gantt.chart.valToPos((tile.start_s + tile.end_s) / 2, "x"),
                    box.top + (index + 0.5) * LANE_PX - gantt.host.scrollTop];
        }""",
        job_id,
    )
    return float(x), float(y)


def test_a_click_on_a_lane_opens_the_jobs_life(shown: Page) -> None:
    """A job's life shows each turn with its gap and pin, and the inputs of each pin's decision."""
    shown.mouse.click(*lane_point(shown, "fleet/team-1/job-07"))
    life = shown.locator("#life")
    expect(life).to_be_visible()
    expect(life.locator("h2")).to_have_text("fleet/team-1/job-07")
    expect(life.locator("tbody tr:not(.why)")).to_have_count(NUM_TURNS)
    life.get_by_role("button", name="Turn 3: why").click()
    why = life.locator("tr.why:visible")
    expect(why).to_contain_text("Inputs of the last decision")
    expect(why).to_contain_text("tool observations")
    expect(why).to_contain_text("(median-horizon)")
    save_screenshot(shown, "report-life")
    shown.keyboard.press("Escape")
    expect(life).to_be_hidden()


def test_the_seconds_of_a_job_add_up(shown: Page) -> None:
    """The durations in a job's life add up to the whole of the job's time."""
    sums = shown.evaluate("jobs.map((job) => [job.seconds.reduce((a, b) => a + b, 0), job.wall_s])")
    for seconds, wall_s in sums:
        assert seconds == pytest.approx(wall_s, abs=0.01)


def test_the_keyboard_reaches_a_jobs_life(shown: Page) -> None:
    """Arrow keys select lanes and Enter opens one; the selected lane is announced."""
    shown.locator("#gantt").focus()
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowDown")
    expect(shown.locator("#gantt-choice")).to_contain_text("10 turns")
    shown.keyboard.press("Enter")
    expect(shown.locator("#life")).to_be_visible()
    expect(shown.locator("#life h2")).to_have_text(shown.evaluate("jobs[1].job_id"))
    shown.get_by_role("button", name="Show on the timeline").click()
    expect(shown.locator("#life")).to_be_hidden()
    assert seen_seconds(shown) < shown.evaluate("timeWindow.whole[1]")


def test_an_address_opens_a_life(page: Page, report: Path) -> None:
    """A link with a job's id opens its life."""
    page.goto(report.as_uri() + "#job=fleet%2Fteam-1%2Fjob-07")
    expect(page.locator("#life h2")).to_have_text("fleet/team-1/job-07")


def test_tables_are_sorted_and_searched(shown: Page) -> None:
    """Tables sort by any column in both directions, and can be searched."""
    shown.get_by_role("button", name="began at").click()
    first = shown.locator("#job-table tbody tr").first
    expect(first).to_contain_text(shown.evaluate("shortened(jobs.at(-1).name, 44)"))
    shown.get_by_role("button", name="began at").click()
    expect(first).to_contain_text(shown.evaluate("shortened(jobs[0].name, 44)"))
    shown.get_by_label("Find").fill("JOB-07")
    expect(shown.locator("#job-table tbody tr")).to_have_count(1)


def test_a_calls_points_can_be_looked_at_alone(shown: Page) -> None:
    """A call's points are selected from the list or from the table."""
    all_points = shown.evaluate("report.tools.reduce((sum, tool) => sum + tool.points.length, 0)")
    assert all_points == NUM_JOBS * (NUM_TURNS - 1)
    shown.locator("#tool-table").get_by_role("button", name="grep").click()
    expect(shown.locator("#scatter-tool option:checked")).to_have_text("grep")


def test_a_point_tells_its_gap_and_opens_its_job(shown: Page) -> None:
    """A click on a point opens the job that it belongs to."""
    shown.locator("#scatter").scroll_into_view_if_needed()
    x, y, job_id = shown.evaluate(
        """() => {
            const [point] = grants.points;
            const box = grants.chart.over.getBoundingClientRect();
            return [box.left + grants.chart.valToPos(point.x, "x"),
                    box.top + grants.chart.valToPos(point.y, "y"), point.job];
        }"""
    )
    shown.mouse.move(x, y)
    expect(shown.locator("#tip")).to_contain_text(re.compile(r"actual gap.*granted.*pin", re.DOTALL))
    shown.mouse.click(x, y)
    expect(shown.locator("#life h2")).to_have_text(job_id)


def test_dark_is_as_the_system_says_and_as_the_reader_wants(page: Page, report: Path) -> None:
    """The system's setting decides at first; then the buttons do, charts included."""
    page.emulate_media(color_scheme="dark")
    open_page(page, report)
    dark = ground(page)
    save_screenshot(page, "report-dark")
    drawn = canvas_pixels(page)
    page.get_by_role("button", name="Light").click()
    assert ground(page) != dark
    page.wait_for_function(
        "before => document.querySelector('#pool canvas').toDataURL() !== before", arg=drawn
    )
    page.get_by_role("button", name="Auto").click()
    assert ground(page) == dark


def ground(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def canvas_pixels(page: Page) -> str:
    return str(page.evaluate("document.querySelector('#pool canvas').toDataURL()"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(shown: Page, scheme: str) -> None:
    """All text meets WCAG AA on its background in both themes, with a life and a tooltip open."""
    shown.get_by_role("button", name=scheme.capitalize()).click()
    shown.mouse.move(*centre(shown.locator("#pool .u-over")))
    shown.evaluate("openLife(jobs[1])")
    shown.locator("#life").get_by_role("button", name="Turn 1: why").click()
    shown.locator("#life .track").first.hover()
    weak = shown.evaluate(WEAK_TEXTS, AA_CONTRAST)
    assert weak == []


WEAK_TEXTS = """least => {
    const channels = (text) => text.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
    const groundOf = (node) => {
        for (; node; node = node.parentElement) {
            const colour = channels(getComputedStyle(node).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const weak = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!own || ["SCRIPT", "STYLE"].includes(node.tagName) || !node.checkVisibility()) continue;
        const [a, b] = [luminance(channels(getComputedStyle(node).color)), luminance(groundOf(node))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const text = node.textContent.trim().slice(0, 40);
        if (contrast < least) weak.push(`${node.tagName} ${text}: ${contrast.toFixed(2)}`);
    }
    return weak;
}"""


def test_a_narrow_window_shows_all_without_scrolling_sideways(page: Page, report: Path) -> None:
    """Wide content scrolls inside its own element, so that page and life fit the window."""
    page.set_viewport_size({"width": 400, "height": WINDOW["height"]})
    open_page(page, report)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    save_screenshot(page, "report-narrow")
    page.evaluate("openLife(jobs[0])")
    expect(page.locator("#life")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("document.querySelector('#life').scrollWidth") <= 400


def test_charts_follow_the_windows_width(shown: Page) -> None:
    """Charts resize with the window and stay aligned in time."""
    shown.set_viewport_size({"width": 900, "height": WINDOW["height"]})
    shown.wait_for_function("document.querySelector('#pool canvas').getBoundingClientRect().width < 900")
    lefts = shown.evaluate(
        """['gantt', 'pool', 'queue']
            .map((id) => document.querySelector(`#${id} .u-over`).getBoundingClientRect())
            .map((box) => [Math.round(box.left), Math.round(box.right)])"""
    )
    assert lefts[0] == lefts[1] == lefts[2]
    assert shown.evaluate("document.documentElement.scrollWidth") <= 900
