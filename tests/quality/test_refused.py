"""What `quality.model`, `profile` and `advise` refuse alike, in one sentence each."""

import copy

import pytest
import torch

import sparse_attn as sa
from sparse_attn.advisor._report import page

BAND = sa.Band(3)
TOOLS = {
    "model": lambda model, inputs, **more: sa.quality.model(model, inputs, BAND, **more),
    "profile": lambda model, inputs, **more: sa.profile(model, inputs, **more),
    "advise": lambda model, inputs, **more: sa.advise(model, inputs, patterns=[BAND], **more),
}


@pytest.fixture
def model():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_meta_tensors_have_no_figures(model, tool):
    text = torch.randn(2, 64, 32)
    for inputs in (text.to("meta"), {"src": text.to("meta")}, [text, text.to("meta")]):
        with pytest.raises(ValueError, match=r"inputs with contents, got meta tensors$"):
            tool(model, inputs, progress=False)
    with pytest.raises(ValueError, match=r"a model whose parameters have contents, got meta"):
        tool(copy.deepcopy(model).to("meta"), text, progress=False)


class Looks(torch.nn.Module):
    """As models of transformers that look at images."""

    main_input_name = "pixel_values"

    def forward(self, input_ids=None, pixel_values=None):
        return torch.zeros(1, dtype=pixel_values.dtype)


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_an_image_alone_is_no_text(tool):
    sentence = (
        r"^sparse_attn\.\S+: expected inputs of Looks by name, such as {'pixel_values': tensor}, "
        r"got a tensor of shape \(1, 3, 8, 8\) as input_ids$"
    )
    model = Looks()
    model.config = None
    with pytest.raises(ValueError, match=sentence):
        tool(model, torch.randn(1, 3, 8, 8), progress=False)


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_flags_are_bools(model, tool):
    with pytest.raises(
        TypeError, match=r"^sparse_attn\.\S+: expected progress to be a bool, got int"
    ):
        tool(model, torch.randn(1, 64, 32), progress=1)


def test_seconds_are_asked_for_by_a_bool(model):
    with pytest.raises(TypeError, match="timed to be a bool, got int"):
        sa.quality.model(model, torch.randn(1, 64, 32), BAND, timed=1, progress=False)


class Scores(torch.nn.Module):
    def forward(self, src):
        return {"scores": src}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_an_output_without_what_is_judged_says_what_that_is(tool):
    with pytest.raises(TypeError, match=r"a tensor, logits or last_hidden_state, got dict$"):
        tool(Scores(), torch.randn(1, 64, 32), progress=False)


def test_a_report_goes_to_a_path():
    with pytest.raises(
        TypeError, match=r"^sparse_attn\.Advice\.report: expected path to be a path"
    ):
        page(3, None)
