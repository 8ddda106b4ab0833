from __future__ import annotations

import json
import math

import pytest

from kvquant.export.verify_report import (
    Finding,
    LayerVerdict,
    VerifyReport,
    examples,
    ranges,
    some,
    spread,
)


def _say(layer: int, where: str) -> tuple[str, str]:
    return f"{where}: as in {layer}", "mend"


def test_a_few_layers_get_a_finding_each() -> None:
    found = spread([5, 2], range(8), _say)
    assert found == [
        Finding("layer 2: as in 2", "mend", layer=2),
        Finding("layer 5: as in 5", "mend", layer=5),
    ]


def test_all_layers_share_one() -> None:
    assert spread([1, 0], range(2), _say) == [Finding("all 2 layers: as in 0", "mend")]


def test_a_model_of_one_layer_has_that_layer() -> None:
    assert spread([3], [3], _say) == [Finding("layer 3: as in 3", "mend", layer=3)]


def test_many_layers_share_one() -> None:
    found = spread([0, 1, 2, 4, 6], range(9), _say, serious=False)
    assert found == [Finding("layers 0-2, 4, 6: as in 0", "mend", serious=False)]


def test_no_layer_no_finding() -> None:
    assert spread([], range(2), _say) == []


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([3, 1, 2], "1-3"), ([0, 2, 3, 9], "0, 2-3, 9")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_examples() -> None:
    assert examples(["a"]) == "a"
    assert examples(["a", "b"]) == "a, b"
    assert examples(["a", "b", "c"]) == "a, b and 1 more"
    assert examples([str(i) for i in range(1002)]) == "0, 1 and 1,000 more"


def test_some() -> None:
    assert (some(1, "tensor"), some(1000, "tensor")) == ("1 tensor", "1,000 tensors")


def test_a_report_is_ok_without_serious_findings() -> None:
    assert VerifyReport("vllm", "d", (), (Finding("x", serious=False),)).ok
    assert not VerifyReport("vllm", "d", (), (Finding("x"),)).ok


def test_as_json() -> None:
    layer = LayerVerdict(0, "k", None, (math.nan, 0.5), (-math.inf,), "checkpoint")
    values = VerifyReport("vllm", "d", (layer,), (Finding("x", "y", 3),)).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == {
        "engine": "vllm",
        "directory": "d",
        "ok": False,
        "layers": [
            {
                "layer": 0,
                "key": "k",
                "value": None,
                "key_scale": ["nan", 0.5],
                "value_scale": ["-inf"],
                "source": "checkpoint",
            }
        ],
        "findings": [{"what": "x", "fix": "y", "layer": 3, "serious": True}],
    }
