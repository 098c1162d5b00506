"""Merges the views of several cores into one, as if their pools were one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.watch.block_map import FIRST_JOB, MAX_JOBS
from engine.watch.view import SHARED, BlockMap, Gauges, HeldPin, Scene, Totals, View
from tracing.events import PinEvent

_decode = msgspec.json.Decoder(View).decode
_encode = msgspec.json.Encoder().encode


def merge_views(views: Sequence[bytes]) -> bytes:
    """Merges views, as JSON, into one. It has a scene if each of them has one."""
    decoded = [_with_own_pins(_decode(view), number, len(views)) for number, view in enumerate(views)]
    scenes = [view.scene for view in decoded if view.scene is not None]
    return _encode(
        View(
            now=max(view.now for view in decoded),
            gauges=_gauges([view.gauges for view in decoded]),
            totals=_totals([view.totals for view in decoded]),
            phases=[change for view in decoded for change in view.phases],
            events=[event for view in decoded for event in view.events],
            num_left_out=sum(view.num_left_out for view in decoded),
            scene=_scene(scenes) if len(scenes) == len(decoded) else None,
        )
    )


def _with_own_pins(view: View, number: int, count: int) -> View:
    """Makes pin ids unique across cores: each core numbers its pins from one."""

    def own(pin_id: int) -> int:
        return pin_id * count + number

    events = [
        msgspec.structs.replace(event, pin_id=own(event.pin_id))
        if isinstance(event, PinEvent) and event.pin_id is not None
        else event
        for event in view.events
    ]
    scene = view.scene
    if scene is not None:
        pins = [msgspec.structs.replace(pin, pin_id=own(pin.pin_id)) for pin in scene.pins]
        scene = msgspec.structs.replace(scene, pins=pins)
    return msgspec.structs.replace(view, events=events, scene=scene)


def _gauges(gauges: Sequence[Gauges]) -> Gauges:
    names = Gauges.__struct_fields__
    return Gauges(**{name: sum(getattr(each, name) for each in gauges) for name in names})


def _totals(totals: Sequence[Totals]) -> Totals:
    names = [name for name in Totals.__struct_fields__ if name != "elapsed_s"]
    sums = {name: sum(getattr(each, name) for each in totals) for name in names}
    return Totals(elapsed_s=max(each.elapsed_s for each in totals), **sums)


def _scene(scenes: Sequence[Scene]) -> Scene:
    jobs = sorted((job for scene in scenes for job in scene.jobs), key=lambda job: job.idle_s)
    pins: list[HeldPin] = [pin for scene in scenes for pin in scene.pins]
    return Scene(
        policy=scenes[0].policy,
        requests=[request for scene in scenes for request in scene.requests],
        pins=sorted(pins, key=lambda pin: pin.deadline_s),
        jobs=jobs,
        blocks=_blocks([scene.blocks for scene in scenes]),
    )


def _blocks(maps: Sequence[BlockMap]) -> BlockMap:
    """Concatenates the pools. Cells have one size: a pool with another cell size is counted, but not
    drawn."""
    drawn = [each for each in maps if each.blocks_per_cell == maps[0].blocks_per_cell]
    owners, jobs = _owners(drawn)
    return BlockMap(
        num_blocks=sum(each.num_blocks for each in drawn),
        blocks_per_cell=maps[0].blocks_per_cell,
        running=b"".join(each.running for each in drawn),
        pinned=b"".join(each.pinned for each in drawn),
        cached=b"".join(each.cached for each in drawn),
        owners=owners,
        num_running=sum(each.num_running for each in maps),
        num_pinned=sum(each.num_pinned for each in maps),
        num_cached=sum(each.num_cached for each in maps),
        num_held=sum(each.num_held for each in maps),
        jobs=jobs,
    )


def _owners(maps: Sequence[BlockMap]) -> tuple[bytes, list[str]]:
    """Each cell's owner as an index in one common list of jobs, and that list."""
    places: dict[str, int] = {}
    for each in maps:
        for job in each.jobs:
            if len(places) < MAX_JOBS:
                places.setdefault(job, FIRST_JOB + len(places))
    owners = bytearray()
    for each in maps:
        table = [0, SHARED, *(places.get(job, SHARED) for job in each.jobs)]
        owners += each.owners.translate(bytes(table).ljust(256, b"\x01"))
    return bytes(owners), list(places)
