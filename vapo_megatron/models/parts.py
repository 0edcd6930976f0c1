"""Rules of the parts that layers are made of, under the names that most families give them in their
files."""

from vapo_megatron.models.layers import (
    Experts,
    LatentAttention,
    Layer,
    MlpKind,
    SelfAttention,
    SoftmaxAttention,
)
from vapo_megatron.models.rules import (
    QKV,
    ExactVector,
    ExpertGateUp,
    FusedGateUp,
    GatedQKV,
    GateUp,
    Replicated,
    Row,
    Rule,
)

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
GATED = ("gate_proj", "up_proj", "down_proj")


def decoder_layer(hidden_size: int, attention: SoftmaxAttention, mlp: MlpKind) -> Layer:
    """Llama's layer: a norm, attention, a norm, an MLP; dense or with experts."""
    rules = attention_block(hidden_size, attention)
    if isinstance(mlp, Experts):
        return Layer(
            attention,
            mlp,
            rules=(*rules, *router(hidden_size, mlp), *shared_expert(hidden_size, mlp)),
            expert_rules=expert(hidden_size, mlp),
        )
    return Layer(attention, mlp, rules=(*rules, *gated_mlp(hidden_size, mlp.size)))


def attention_block(hidden_size: int, attention: SoftmaxAttention) -> tuple[Rule, ...]:
    """A norm, attention, and the norm before the MLP."""
    if isinstance(attention, LatentAttention):
        rules = latent_attention(hidden_size, attention)
    else:
        rules = self_attention(hidden_size, attention)
    return (
        norm("input_layernorm", LAYER + "input_layernorm", hidden_size),
        *rules,
        norm("pre_mlp_layernorm", LAYER + "post_attention_layernorm", hidden_size),
    )


def norm(megatron: str, name: str, size: int) -> Rule:
    """The weight of a norm. megatron, name: without the final ".weight"."""
    return Replicated(f"{megatron}.weight", (f"{name}.weight",), (size,))


def self_attention(
    hidden_size: int, attention: SelfAttention, prefix: str = ATTENTION
) -> tuple[Rule, ...]:
    """Projections of softmax attention, with their biases and the norms of queries and keys where
    it has these."""
    sizes = (attention.kv_size, attention.num_kv_heads)

    def projections(kind: str, shape: tuple[int, ...]) -> Rule:
        names = tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv")
        megatron = f"self_attention.linear_qkv.{kind}"
        if attention.gated:
            return GatedQKV(
                megatron, names, shape, 2 * attention.query_size, *sizes, attention.head_dim
            )
        return QKV(megatron, names, shape, attention.query_size, *sizes)

    rules = [projections("weight", (hidden_size,))]
    if attention.qkv_bias:
        rules.append(projections("bias", ()))
    if attention.qk_norm is not None:
        rules += _query_and_key_norms(attention, prefix)
    output = prefix + "o_proj."
    rules.append(
        Row(
            "self_attention.linear_proj.weight",
            (output + "weight",),
            (hidden_size, attention.query_size),
        )
    )
    if attention.output_bias:
        rules.append(
            Replicated("self_attention.linear_proj.bias", (output + "bias",), (hidden_size,))
        )
    if attention.sinks:
        rules.append(
            Rule(
                "self_attention.core_attention.softmax_offset",
                (prefix + "sinks",),
                (attention.num_heads,),
            )
        )
    return tuple(rules)


def _query_and_key_norms(attention: SelfAttention, prefix: str) -> list[Rule]:
    if attention.qk_norm == "head":
        return [
            norm(f"self_attention.{x}_layernorm", f"{prefix}{x}_norm", attention.head_dim)
            for x in "qk"
        ]
    return [
        Rule(f"self_attention.{x}_layernorm.weight", (f"{prefix}{x}_norm.weight",), (size,))
        for x, size in (("q", attention.query_size), ("k", attention.kv_size))
    ]


def latent_attention(hidden_size: int, attention: LatentAttention) -> tuple[Rule, ...]:
    """Projections of latent attention and the norms of its narrow vectors. Tensor-parallel ranks
    hold the narrow projections whole, and their own heads of the others."""

    def narrow(name: str, hf: str, rows: int) -> Rule:
        return Replicated(
            f"self_attention.linear_{name}_down_proj.weight",
            (f"{ATTENTION}{hf}.weight",),
            (rows, hidden_size),
        )

    def wide(name: str, hf: str, rows: int, columns: int) -> Rule:
        return Rule(
            f"self_attention.linear_{name}_proj.weight",
            (f"{ATTENTION}{hf}.weight",),
            (rows, columns),
        )

    rank = attention.query_rank
    if rank is None:
        queries = [wide("q", "q_proj", attention.query_size, hidden_size)]
    else:
        queries = [
            narrow("q", "q_a_proj", rank),
            norm("self_attention.q_layernorm", ATTENTION + "q_a_layernorm", rank),
            wide("q_up", "q_b_proj", attention.query_size, rank),
        ]
    kv_rank = attention.kv_rank
    expanded = attention.num_heads * (attention.plain_dim + attention.value_dim)
    return (
        *queries,
        narrow("kv", "kv_a_proj_with_mqa", kv_rank + attention.rotary.channels),
        norm("self_attention.kv_layernorm", ATTENTION + "kv_a_layernorm", kv_rank),
        wide("kv_up", "kv_b_proj", expanded, kv_rank),
        Row(
            "self_attention.linear_proj.weight",
            (ATTENTION + "o_proj.weight",),
            (hidden_size, attention.value_size),
        ),
    )


def gated_mlp(
    hidden_size: int, size: int, prefix: str = MLP, megatron: str = "mlp."
) -> tuple[Rule, ...]:
    """A dense MLP, or the one that all tokens share. megatron: what Megatron's names begin with."""
    gate, up, down = (f"{prefix}{name}.weight" for name in GATED)
    return (
        GateUp(megatron + "linear_fc1.weight", (gate, up), (size, hidden_size)),
        Row(megatron + "linear_fc2.weight", (down,), (hidden_size, size)),
    )


def fused_gated_mlp(hidden_size: int, size: int) -> tuple[Rule, ...]:
    """A dense MLP whose gate and up are one tensor of the file."""
    gate_up, down = (f"{MLP}{name}.weight" for name in ("gate_up_proj", "down_proj"))
    return (
        FusedGateUp("mlp.linear_fc1.weight", (gate_up,), (size, hidden_size)),
        Row("mlp.linear_fc2.weight", (down,), (hidden_size, size)),
    )


def router(
    hidden_size: int,
    experts: Experts,
    weight: str = MLP + "gate.weight",
    bias: str = MLP + "gate.e_score_correction_bias",
) -> tuple[Rule, ...]:
    """A router, with the numbers that experts are chosen by where it has these."""
    rules = [Replicated("mlp.router.weight", (weight,), (experts.count, hidden_size))]
    if experts.bias:
        rules.append(ExactVector("mlp.router.expert_bias", (bias,), (experts.count,)))
    return tuple(rules)


def shared_expert(
    hidden_size: int, experts: Experts, prefix: str = MLP + "shared_experts."
) -> tuple[Rule, ...]:
    """The MLP that all tokens share; nothing where there is none."""
    if not experts.shared_size:
        return ()
    return gated_mlp(hidden_size, experts.shared_size, prefix, "mlp.shared_experts.")


def expert(
    hidden_size: int,
    experts: Experts,
    prefix: str = MLP + "experts.{expert}.",
    names: tuple[str, str, str] = GATED,
) -> tuple[Rule, ...]:
    """Rules of each expert. names: of gate, up and down."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        ExpertGateUp("mlp.experts.linear_fc1.weight", (gate, up), (experts.size, hidden_size)),
        Replicated("mlp.experts.linear_fc2.weight", (down,), (hidden_size, experts.size)),
    )
