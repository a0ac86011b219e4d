"""The keys of rotary positions, as configurations of transformers before and after its version 5 write them."""

from typing import Any

from meshwright.hf.architectures.base import Json, Unsupported
from meshwright.zoo.rotary import Linear, Llama3, Scaling, Yarn

KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_KINDS = ("default", "linear", "llama3", "yarn")


def read(keys: Json, default_theta: float) -> Json:
    """The fields `rope_theta` and `rope_scaling` of a zoo `Config`."""
    given = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    theta = given.get("rope_theta") or keys.get("rope_theta") or default_theta
    return {"rope_theta": float(theta), "rope_scaling": scaling(given)}


def scaling(given: Json) -> Scaling | None:
    """The scaling that a dictionary such as `rope_scaling` says; None for none."""
    values = {key: value for key, value in given.items() if key != "rope_theta" and value is not None}
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    if kind not in _KINDS:
        raise Unsupported(f"rope_type is {kind!r}, and the zoo knows {', '.join(_KINDS)}")
    makers: dict[str, Any] = {"default": lambda: None, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    try:
        return makers[kind](**values)
    except TypeError as error:
        reason = str(error).partition("() ")[2] or str(error)
        raise Unsupported(f"its rotary positions of type {kind!r} cannot be understood: {reason}") from None


def _linear(*, factor: float) -> Linear:
    return Linear(float(factor))


def _llama3(
    *, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position_embeddings: int
) -> Llama3:
    return Llama3(float(factor), float(low_freq_factor), float(high_freq_factor), original_max_position_embeddings)


def _yarn(
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Yarn:
    return Yarn(float(factor), float(beta_fast), float(beta_slow), original_max_position_embeddings, truncate)


def written(config: Any) -> Json:
    """The reverse of `read`, in the form that all versions of transformers read."""
    return {"rope_theta": config.rope_theta, "rope_scaling": written_scaling(config.rope_scaling)}


def written_scaling(scaling: Scaling | None) -> Json | None:
    """The reverse of `scaling`."""
    match scaling:
        case None:
            return None
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case Yarn():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.truncate,
                "original_max_position_embeddings": scaling.original,
            }
