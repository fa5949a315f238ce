"""Tiny random transformers models and texts, for comparisons with their own eager attention.

Weights have a standard deviation of 0.15: with the usual 0.02 attention is so flat that a wrong
mask hardly shows.
"""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 97
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GROUPED = dict(COMMON, num_key_value_heads=2, head_dim=16)
WINDOW = 7

CONFIGS = {
    "bert": lambda: transformers.BertConfig(**COMMON),
    "modernbert": lambda: transformers.ModernBertConfig(
        **{k: v for k, v in COMMON.items() if k != "eos_token_id"},
        local_attention=2 * WINDOW,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        eos_token_id=2,
    ),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=32
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "qwen3_sliding": lambda: transformers.Qwen3Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **{k: v for k, v in GROUPED.items() if k != "head_dim"},
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=2,
        num_experts_per_tok=1,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{k: v for k, v in GROUPED.items() if k != "head_dim"}, sliding_window=WINDOW
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,  # of queries and keys: 24
        moe_intermediate_size=32,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128, eos_token_id=None
    ),
}
SEQUENCE_TO_SEQUENCE = {
    # Decoders whose modules are not marked causal: the mask alone says it.
    "nllb_moe": transformers.NllbMoeConfig,
    # Encoders that compute with their mask before they attend.
    "pegasus_x": transformers.PegasusXConfig,
    "bigbird_pegasus": transformers.BigBirdPegasusConfig,
}
ENCODERS = ("bert", "modernbert")
PADDINGS = ("none", "left", "right", "holes")


def sequence_to_sequence(name):
    """Make the configuration of an encoder with a decoder."""
    sizes = {
        f"{part}_{what}": size
        for part in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return SEQUENCE_TO_SEQUENCE[name](
        vocab_size=VOCABULARY,
        d_model=64,
        max_position_embeddings=128,
        pad_token_id=0,
        num_experts=2,
        block_size=16,
        **sizes,
    )


def build(config, implementation="eager", cls=None, seed=0):
    """Make a model with random weights; equal seeds give equal weights."""
    torch.manual_seed(seed)
    if cls is None:
        encoder = config.model_type in ENCODERS
        cls = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    make = getattr(cls, "from_config", None) or cls._from_config
    model = make(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def pair(name, make=None, cls=None):
    """Make a model with its eager attention, and its twin with ours."""
    make = make or CONFIGS[name]
    return build(make(), "eager", cls), build(make(), "sparse_attn", cls)


def text(padding="none", batch=2, length=24, seed=0):
    """Make token ids and their 2-D mask; the first row of the batch is padded."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "right":
        mask[0, -5:] = 0
    elif padding == "holes":
        mask[0, [3, 4, 11]] = 0
    return ids, mask


def new_cache(model, kind):
    """Make an empty cache, a static one of 40 tokens or one that grows."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=40)
    return transformers.DynamicCache(config=model.config)


def output(model, **inputs):
    """Return logits or hidden states."""
    with torch.no_grad():
        result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def assert_same(ours, theirs, mask=None, tolerance=2e-5):
    """Compare (B, S, ...) in the rows of tokens."""
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    assert not ours.isnan().any()
    difference = (ours - theirs).abs().max().item()
    assert difference <= tolerance * max(1.0, theirs.abs().max().item()), difference
