"""Streams, training steps, commands and configurations are as they were recorded."""

import json
from typing import Any

import pytest

from tests.golden.records import (
    FILE,
    STREAMS,
    TRAINED,
    command_records,
    configuration_records,
    stream_record,
    training_record,
)


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


@pytest.mark.parametrize("part", range(5))
def test_streams_give_the_recorded_samples_and_cursors(part: int, records: dict[str, Any]) -> None:
    for number in range(part, STREAMS, 5):
        assert stream_record(number) == records["streams"][number], f"stream {number}"


@pytest.mark.parametrize("part", range(5))
def test_steps_have_the_recorded_loss_and_gradient(part: int, records: dict[str, Any]) -> None:
    for number in range(part, TRAINED, 5):
        recorded = records["training"][number]
        assert training_record(number) == pytest.approx(recorded, rel=1e-9, abs=1e-9), number


def test_commands_print_the_recorded_values(records: dict[str, Any]) -> None:
    """Within 1 %: faster plans are welcome."""
    for command, values in command_records().items():
        recorded = records["commands"][command]
        assert values.keys() == recorded.keys(), command
        for name, value in values.items():
            expected = recorded[name]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=0.01, abs=0.01)
            assert value == expected, f"{command}: {name}"


def test_files_of_other_systems_convert_as_recorded(records: dict[str, Any]) -> None:
    assert configuration_records() == records["configurations"]
