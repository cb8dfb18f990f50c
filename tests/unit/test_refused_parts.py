"""Settings of exchanges, codecs and reducers out of range, and parts that do not go together: one line each."""

from typing import Any

import pytest

import micro
from tests.refusals import refused

SETTINGS: list[tuple[type[Any], dict[str, Any], str, Any]] = [
    (micro.Exchange, {"name": "gather", "rule": "repaired"}, "rule of gather", "repaired"),
    (micro.Exchange, {"name": "dsa", "rule": "paper"}, "rule of dsa", "paper"),
    (micro.Exchange, {"name": "gtopk", "rule": "paper"}, "rule of gtopk", "paper"),
    (micro.Exchange, {"name": "oktopk", "rule": "exact"}, "rule of oktopk", "exact"),
    (micro.Exchange, {"name": "oktopk", "repartition": 0}, "repartition of oktopk", 0),
    (micro.Exchange, {"name": "oktopk", "balance": 0.5}, "balance of oktopk", 0.5),
    (micro.Exchange, {"name": "oktopk", "reevaluate": 5}, "reevaluate of oktopk", "rule=repaired"),
    (micro.Exchange, {"name": "oktopk", "rule": "published", "reevaluate": -1}, "reevaluate of oktopk", -1),
    (micro.Exchange, {"name": "in_pieces"}, "ends or piece_mb", None),
    (micro.Exchange, {"name": "in_pieces", "ends": (3,), "piece_mb": 1}, "ends or piece_mb", 1),
    (micro.Exchange, {"name": "in_pieces", "ends": (3, 3)}, "ends of in_pieces", (3, 3)),
    (micro.Exchange, {"name": "in_pieces", "piece_mb": 0}, "piece_mb of in_pieces", 0),
    (micro.Exchange, {"name": "in_pieces", "each": "oktopk", "piece_mb": 1}, "whole vector", "oktopk"),
    (micro.Exchange, {"name": "in_pieces", "each": "gtopk", "piece_mb": 1}, "whole vector", "gtopk"),
    (micro.Exchange, {"name": "in_pieces", "each": "in_pieces", "piece_mb": 1}, "ends or piece_mb", None),
    (micro.Codec, {"name": "int8", "block": 0}, "block of int8", 0),
    (micro.Codec, {"name": "sign", "block": 0}, "block of sign", 0),
    (micro.Codec, {"name": "onebit", "block": -1}, "block of onebit", -1),
    (micro.Codec, {"name": "qsgd", "bits": 1}, "bits of qsgd", 1),
    (micro.Codec, {"name": "qsgd", "rule": "newest"}, "rule of qsgd", "newest"),
    (micro.Codec, {"name": "terngrad", "clip": 0.0}, "clip of terngrad", 0.0),
    (micro.Codec, {"name": "terngrad", "rule": "newest"}, "rule of terngrad", "newest"),
    (micro.Codec, {"name": "natural", "rule": "newest"}, "rule of natural", "newest"),
    (micro.Codec, {"name": "two_means", "rule": "newest"}, "rule of two_means", "newest"),
    (micro.Codec, {"name": "range_float", "bits": 3}, "bits of range_float", 3),
    (micro.Codec, {"name": "range_float", "mantissa": 8}, "mantissa of range_float", 8),
    (micro.Codec, {"name": "range_float", "bits": 16, "mantissa": 7}, "mantissa of range_float", 7),
    (micro.Reducer, {"name": "powersgd", "rank": 0}, "rank of powersgd", 0),
    (micro.Reducer, {"name": "powersgd", "min_compression": 1.0}, "min_compression of powersgd", 1.0),
    (micro.Reducer, {"name": "powersgd", "columns": 3}, "powersgd", "columns"),
    (micro.Reducer, {"name": "fft", "density": 0.0}, "density", 0.0),
    (micro.Reducer, {"name": "fft", "density": 0.1, "bits": 3}, "bits of range_float", 3),
    (micro.Reducer, {"name": "fft", "density": 0.1, "feedback": "momentum"}, "feedback of fft", "momentum"),
    (micro.Reducer, {"name": "fft", "density": 0.1, "indices": "bitmapp"}, "did you mean 'bitmap'", "bitmapp"),
    (micro.Reducer, {"name": "dct", "density": 0.1, "size": 0}, "size of dct", 0),
    (micro.Reducer, {"name": "dct", "density": 0.1, "transform": "fft"}, "transform of dct", "fft"),
    (micro.Reducer, {"name": "dct", "density": 0.1, "exchange": "union"}, "exchange of dct", "union"),
    (micro.Reducer, {"name": "dct", "density": 0.1, "feedback": "momentum"}, "feedback of dct", "momentum"),
]

TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [  # selector, other parts, what is named
    ("leader", {"exchange": "gather"}, "exchange gather", "use exchange union"),
    ("leader", {"exchange": {"name": "in_pieces", "each": "gather", "piece_mb": 1}}, "in_pieces gather", "one rank"),
    ("leader", {"exchange": "gtopk"}, "exchange gtopk", "one rank"),
    ("micro", {"exchange": "gtopk"}, "exchange gtopk", "whole vector"),
    ("randomk", {"exchange": "dsa"}, "exchange dsa", "same indices"),
    ("topk", {"exchange": "oktopk", "codec": "half"}, "exchange oktopk", "half"),
    ("topk", {"exchange": "gtopk", "codec": "half"}, "exchange gtopk", "half"),
    ("topk", {"exchange": {"name": "dsa", "rule": "published"}, "codec": "half"}, "dsa", "half"),
    ("topk", {"exchange": {"name": "gtopk", "rule": "published"}, "indices": "packed"}, "gtopk", "packed"),
    ("topk", {"codec": {"name": "qsgd", "rule": "published"}}, "codec qsgd", "feedback=none"),
    ("topk", {"codec": {"name": "terngrad", "rule": "published"}}, "codec terngrad", "feedback=none"),
    ("topk", {"indices": "bitmap", "density": 0.01}, "indices bitmap", "0.01"),
    ("everything", {"density": 0.5}, "everything", "density=1"),
]
KINDS: dict[str, type[Any]] = {"exchange": micro.Exchange, "codec": micro.Codec, "indices": micro.IndexCodec}


@pytest.mark.parametrize(("kind", "spec", "key", "given"), SETTINGS)
def test_a_setting_out_of_range_is_refused(kind: type[Any], spec: dict[str, Any], key: str, given: Any) -> None:
    refused(lambda: micro.build(kind, spec), key, given)


@pytest.mark.parametrize(("selector", "parts", "key", "given"), TOGETHER)
def test_parts_that_do_not_go_together_are_refused(selector: str, parts: dict[str, Any], key: str, given: str) -> None:
    built = {name: micro.build(KINDS[name], spec) if name in KINDS else spec for name, spec in parts.items()}
    chosen = micro.build(micro.Selector, selector)
    refused(lambda: micro.SparseReducer(chosen, **{"density": 0.1, **built}), key, given)


def test_an_unbiased_estimator_refuses_a_residual() -> None:
    refused(lambda: micro.SparseReducer(micro.RandomK(unbiased=True), 0.1), "unbiased", "feedback=none")
