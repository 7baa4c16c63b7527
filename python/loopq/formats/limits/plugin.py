"""Limits of loopq's plugin for vLLM (`loopq.runtime.vllm`)."""

from __future__ import annotations

from collections.abc import Callable

from loopq.errors import ConfigError
from loopq.formats.fused import EXPERT
from loopq.formats.native import NATIVE
from loopq.formats.rules import LIMITS, Broken, Config, Rule, named, where
from loopq.formats.support import READS
from loopq.layers.loop_spec import LOOP

_SYSTEMS = ("huginn", "rllama", "dory")
#: Settings in a config.json that it does not serve.
_SETTINGS: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    (
        "test_time_noise, and another state_init than like-init",
        lambda config: (
            bool(config.get("test_time_noise")) or config.get("state_init", "like-init") != "like-init"
        ),
    ),
    (
        "Recurrent-OLMo-2, whose blocks have their norms elsewhere",
        lambda config: not embedding_is_scaled(config) and "olmo" in str(config.get("auto_map")),
    ),
    (
        "another recurrent_kv_cache_mode than per_loop",
        lambda config: config.get("recurrent_kv_cache_mode", "per_loop") != "per_loop",
    ),
)


def embedding_is_scaled(config: Config) -> bool:
    """Whether embeddings of a ``huginn_raven`` are scaled, as Huginn's are. R-Llama's are not."""
    return (config.get("init_values") or {}).get("embed_scale") != 1.0


def refuse_config(config: Config) -> None:
    """Refuse a config.json that the plugin does not serve.

    Raises
    ------
    ConfigError
        The message names the setting.
    """
    for what, broken in _SETTINGS:
        if broken(config):
            raise ConfigError(f"config.json: {what}: loopq's plugin does not serve it; `loopq run` does")


def refuse_loop(config: Config) -> None:
    """Refuse a config.json whose architectures run each layer of its loop once.

    Raises
    ------
    ConfigError
        The message names them.
    """
    names = config.get("architectures") or ()
    if config.get(LOOP) is not None and not any(name.startswith("Looped") for name in names):
        raise ConfigError(
            f"config.json: {LOOP} beside the architectures {list(names)}, which run every layer once; put 'Looped' "
            "before the name, or use `loopq run`"
        )


def _of(broken: Callable[[Config], bool]) -> Broken:
    """The first layer, if a config.json is refused."""
    return lambda layers, config, dense: list(layers)[:1] if broken(config) else []


LIMITS.register("plugin")((
    *(
        Rule(
            ("vllm",), READS["vllm"], f"{what} (config.json)", "`loopq run`", "loopq's plugin: it refuses config.json",
            _of(broken), _SYSTEMS,
        )
        for what, broken in _SETTINGS
    ),
    Rule(
        ("vllm",), (NATIVE.name,), "Dory under transformers' names",
        "a folder with the published names as the model", "vLLM 0.32 on a CPU: run",
        named(r"\.(self_attn|mlp)\."), ("dory",),
    ),
    Rule(
        ("vllm",), (NATIVE.name,), "experts in codes: it has stacks of them", "--exclude '*experts*'",
        "loopq's plugin: it refuses them",
        where(lambda layer: EXPERT.search(layer.name) is not None),
    ),
))  # fmt: skip
