"""A policy and the model's own ``set_attn_implementation``, in every order: the last one counts."""

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import CONFIGS, build, output, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply, restore = sa.integrations.transformers.apply, sa.integrations.transformers.restore
NARROW = sa.Band(3)
STEPS = {
    "apply": lambda model: apply(model, NARROW),
    "restore": restore,
    "ours": lambda model: model.set_attn_implementation("sparse_attn"),
    "sdpa": lambda model: model.set_attn_implementation("sdpa"),
}


def chosen(model):
    return {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}


@pytest.mark.parametrize(
    ("steps", "implementation", "is_narrow"),
    [
        ("apply restore", "eager", False),
        ("apply sdpa", "sdpa", False),
        ("apply sdpa restore", "sdpa", False),
        ("apply sdpa apply", "sparse_attn", True),
        ("apply sdpa apply restore", "sdpa", False),
        ("apply sdpa ours", "sparse_attn", True),
        ("apply sdpa ours restore", "eager", False),
        ("apply apply restore", "eager", False),
        ("ours apply sdpa restore", "sdpa", False),
        ("ours apply restore", "sparse_attn", False),
    ],
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_was_said_last_counts(name, steps, implementation, is_narrow):
    ids, _ = text()
    model = build(CONFIGS[name]())
    own, narrow = output(model, input_ids=ids), output(apply(model, NARROW), input_ids=ids)
    restore(model)
    for step in steps.split():
        STEPS[step](model)
    assert chosen(model) == {implementation}
    torch.testing.assert_close(output(model, input_ids=ids), narrow if is_narrow else own)


def test_a_part_that_was_set_alone_keeps_it():
    model = apply(build(CONFIGS["llama"]()), NARROW)
    model.model.config = type(model.config)(**model.config.to_dict())
    model.model.set_attn_implementation("sdpa")
    model.config._attn_implementation = "sparse_attn"
    restore(model)
    assert (model.config._attn_implementation, model.model.config._attn_implementation) == (
        "eager",
        "sdpa",
    )


def test_judging_leaves_what_was_set_after_a_policy():
    model = apply(build(CONFIGS["llama"]()), NARROW)
    model.set_attn_implementation("sdpa")
    ids, _ = text()
    before = output(model, input_ids=ids)
    sa.quality.model(model, ids, {"band": NARROW}, timed=False, progress=False)
    assert chosen(model) == {"sdpa"} and torch.equal(output(model, input_ids=ids), before)
    assert chosen(restore(model)) == {"sdpa"}


def test_patch_sdpa_refuses_a_model_under_a_policy():
    """Its patch would do nothing now, and run where `restore` gives the own attention back."""
    ids, _ = text()
    model = build(CONFIGS["bert"](), "sdpa")
    own = output(model, input_ids=ids)
    with pytest.raises(ValueError, match=r"without a policy of apply, got BertModel .*restore it"):
        sa.patch_sdpa(apply(model, NARROW), NARROW)
    assert torch.equal(output(restore(model), input_ids=ids), own)
    with sa.patch_sdpa(model, NARROW) as patched:  # whichever is undone first
        apply(model, NARROW)
    assert patched.layers is None
    assert torch.equal(output(restore(model), input_ids=ids), own)
