"""The layers of pipeline stages by Megatron-LM's keys, against Megatron-Core."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.parallel.layout import TrainLayout
from megarl.parallel.pipeline_split import PipelineSplit, spelt_out, written

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"


@st.composite
def stages(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Pipeline size, chunks, and the layers of every chunk; the first and the last may have none."""
    pp, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    ends = st.integers(0, 5)
    middle = draw(st.lists(st.integers(1, 5), min_size=pp * chunks - 2, max_size=pp * chunks - 2))
    return pp, chunks, [draw(ends), *middle, draw(ends)]


@given(stages())
def test_every_layer_is_held_once_and_in_order(case: tuple[int, int, list[int]]) -> None:
    pp, chunks, counts = case
    split, number = PipelineSplit(pipeline_model_parallel_layout=written(counts)), sum(counts)
    assert split.chunks(pp, None) == split.chunks(pp, chunks) == chunks
    layout = TrainLayout(ranks=range(pp), pp=pp, chunks=chunks, split=split)
    held = layout.all_layers(number)
    assert [layer for chunk in held for layer in chunk] == list(range(number))
    assert [len(chunk) for chunk in held] == counts
    assert held == [layout.layers(number, stage, chunk) for chunk in range(chunks) for stage in range(pp)]


@given(stages(), st.data())
def test_a_layout_is_spelt_out_as_megatron_core_does(case: tuple[int, int, list[int]], data: st.DataObject) -> None:
    text = written(case[2])
    for _ in range(data.draw(st.integers(0, 3))):  # commas mean nothing, but within a number
        at = data.draw(
            st.sampled_from([i for i in range(len(text) + 1) if text[i - 1 : i] not in tuple("0123456789*")])
        )
        text = f"{text[:at]},{text[at:]}"
    names = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.loss: "L"}
    rows = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert spelt_out(text) == ["".join(names[kind] for kind in row) for row in rows]


def _megatron_core(num_layers: int, pp: int, chunks: int, keys: dict[str, Any]) -> list[range] | None:
    """The layers of every chunk in the order of the model; None if Megatron-Core refuses."""
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            **keys,
        )
        places = [(chunk if chunks > 1 else None, stage) for chunk in range(chunks) for stage in range(pp)]
        counts = [get_num_layers_to_build(config, *place) for place in places]
        if min(counts) < 0:  # it subtracts whatever the keys say
            return None
        if pp == 2 and chunks > 1 and keys.get(FIRST) and keys.get(LAST):
            firsts = [sum(counts[:i]) for i in range(len(counts))]  # it divides by the 0 stages between
        else:
            firsts = [get_transformer_layer_offset(config, *place) for place in places]
        return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    except (ValueError, AssertionError):
        return None


def _here(num_layers: int, pp: int, chunks: int, keys: dict[str, Any]) -> list[range] | None:
    try:
        layout = TrainLayout(ranks=range(pp), pp=pp, chunks=chunks, split=PipelineSplit(**keys))
        return layout.all_layers(num_layers)
    except ValueError:
        return None


def _keys() -> list[dict[str, Any]]:
    ends = [{FIRST: first, LAST: last} for first, last in product((None, 1, 2, 4), repeat=2) if first or last]
    return [*ends, *({EMBEDDING: e, LOSS: loss} for e, loss in product((False, True), repeat=2) if e or loss)]


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_keys_mean_what_they_mean_in_megatron_core(pp: int, chunks: int) -> None:
    accepted = 0
    for num_layers, keys in product(range(pp * chunks, 15), _keys()):
        held = _here(num_layers, pp, chunks, keys)
        assert held == _megatron_core(num_layers, pp, chunks, keys), (num_layers, keys)
        accepted += held is not None
    assert accepted > 5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({FIRST: 2, LOSS: True}, f"{FIRST} and {LAST} contradict {EMBEDDING} and {LOSS}"),
        ({LAYOUT: "Ett|ttL", LAST: 2}, f"{LAYOUT} says what every stage holds; leave out the keys num_layers_in_"),
        ({LAYOUT: "Ett|tt,m|L"}, "layers of multi-token prediction (m) are not trained; leave them out"),
        ({LAYOUT: "Ett|ttl"}, f"{LAYOUT} = Ett|ttl has 'l'; write E (embedding), t (layer), L (loss), | and *number"),
        ({LAYOUT: "ttE|ttL"}, "must begin with E in the first stage, go on with layers (t) and end with L in the last"),
        ({LAYOUT: "|Ett|ttL"}, "must begin with E in the first stage"),
        ({LAYOUT: "Ett|tt"}, "end with L in the last"),
        ({LAYOUT: "Ett||ttL"}, "stage 2 of 3 holds nothing"),
        ({LAYOUT: "E(t*9999999|)*2L"}, "repeats a part more than 9,999 times"),
        ({LAYOUT: "E(t*9999|)*9999L"}, "has more than a million layers"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        PipelineSplit(**keys)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "pp", "chunks", "said"),
    [
        (
            {FIRST: 4, LAST: 3},
            4,
            1,
            "leave 1 of 8 layers for 2 other stages, which must have equally many, one at leas",
        ),
        ({FIRST: 3}, 3, 1, "leave 5 of 8 layers for 2 other stages"),
        ({FIRST: 3, LAST: 3}, 2, 1, "leave 2 of 8 layers for 0 other stages"),
        ({FIRST: 8}, 1, 1, f"{FIRST} and {LAST} need pipeline_model_parallel_size of 2 or more"),
        ({FIRST: 3, LAST: 5}, 2, 2, "3 layers of a stage do not divide into virtual_pipeline_model_parallel_size = 2"),
        ({EMBEDDING: True}, 2, 1, "8 layers and 1 more do not divide into 2 equal parts"),
        ({LAYOUT: "Et*3|t*4L"}, 2, 1, "has 7 layers (t), and the model 8"),
    ],
)
def test_layers_that_do_not_go_into_the_stages(keys: dict[str, Any], pp: int, chunks: int, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        TrainLayout(ranks=range(pp), pp=pp, chunks=chunks, split=PipelineSplit(**keys)).all_layers(8)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_layout_says_the_number_of_chunks() -> None:
    split = PipelineSplit(pipeline_model_parallel_layout="Et|t|t|tL")
    assert [split.chunks(pp, None) for pp in (2, 4)] == [2, 1] and split.chunks(2, 2) == 2
    for pp, virtual, said in (
        (3, None, "has 4 stages; write pipeline_model_parallel_size = 3 of them, or twice"),
        (1, None, "has 4 stages; write pipeline_model_parallel_size = 1 of them"),
        (
            4,
            2,
            "has 4 stages, 1 for each of pipeline_model_parallel_size = 4, and virtual_pipeline_model_parallel_size",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            split.chunks(pp, virtual)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 4))
def test_keys_are_written_as_on_a_command_line(first: int, last: int) -> None:
    assert str(PipelineSplit(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)) == (
        f"actor.megatron.{FIRST}={first} actor.megatron.{LAST}={last}"
    )
    text = written([first, 1, 1, last])
    assert str(PipelineSplit(pipeline_model_parallel_layout=text)) == f"actor.megatron.{LAYOUT}='{text}'"
