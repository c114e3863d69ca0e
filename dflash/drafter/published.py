"""The published config.json of a drafter (that of DrafterConfig.to_json): the types and ranges of its fields.

Knows dictionaries: no tensor, no file. Fields that no layer is built from are not looked at.
"""

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

DEFAULT_EPS = 1e-6
LayerType = Literal["full_attention", "sliding_attention"]
FULL, SLIDING = get_args(LayerType)
Model = TypeVar("Model", bound=BaseModel)
PositiveNumber = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """No text is taken for a number, and no truth value or float for a count."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Rope(Settings):
    """What `dflash.drafter.shape.rope_parameters` reads."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveNumber | None = None
    partial_rotary_factor: Share | None = None
    factor: PositiveNumber | None = None
    low_freq_factor: PositiveNumber | None = None
    high_freq_factor: PositiveNumber | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveNumber | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    full_attention: "Rope | None" = None


class Method(Settings):
    mask_token_id: int = Field(ge=0)
    target_layer_ids: list[int]


class Published(Settings):
    block_size: int = Field(ge=2, le=128)
    num_hidden_layers: int = Field(ge=1, le=1000)
    num_target_layers: PositiveInt
    dflash_config: Method
    vocab_size: PositiveInt
    draft_vocab_size: int | None = Field(None, ge=0)
    hidden_size: PositiveInt
    target_hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    layer_types: list[LayerType] | None = None
    sliding_window: int | None = Field(None, ge=0)
    is_causal: bool | None = None
    rms_norm_eps: float = Field(DEFAULT_EPS, gt=0, lt=1)
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: PositiveNumber | None = None
    partial_rotary_factor: Share | None = None

    @model_validator(mode="after")
    def _one_theta(self) -> "Published":
        """Transformers 4 reads the one, 5 the other."""
        rope = self.rope_parameters and (self.rope_parameters.full_attention or self.rope_parameters)
        if rope and rope.rope_theta and self.rope_theta and rope.rope_theta != self.rope_theta:
            raise ValueError(f"rope_theta {self.rope_theta:g}, but {rope.rope_theta:g} in its rope_parameters")
        return self

    @model_validator(mode="after")
    def _a_type_for_each_layer(self) -> "Published":
        types = self.layer_types or [FULL] * self.num_hidden_layers
        if len(types) != self.num_hidden_layers:
            raise ValueError(f"{self.num_hidden_layers} layers, but {len(types)} layer_types")
        if self.is_causal is not None and {kind == SLIDING for kind in types} != {self.is_causal}:
            raise ValueError(
                f"is_causal {self.is_causal}, but here layers of {SLIDING} look back, and others in both directions"
            )
        return self


def checked(model: type[Model], settings: Mapping[str, Any]) -> Model:
    """A config.json, or a part of it, as `model`.

    Raises ValueError naming each field that is missing or wrong; whoever knows the file puts it before that.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        wrong = []
        for one in error.errors():
            field, reason = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
            if one["type"] == "missing":
                wrong.append(f"no {field!r}")
            elif field:
                reason = reason.partition(" or instance of")[0].lower()
                wrong.append(f"{field} {shortened(one['input'])} ({reason})")
            else:
                wrong.append(reason)
        raise ValueError(f"has {', '.join(wrong)}; correct it, or get the folder again") from None
