"""Spectral radius and norm of the step (Li, App. K)."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, Found, Section
from loopq.errors import ConfigError
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.diagnosis.exposed import rounded_exposed
from loopq.paper.diagnosis.spectral import radius_study
from loopq.paper.diagnosis.stepmap import Bypass
from loopq.storage.schema import Object

# Jacobian products of one map: about 300 for each of two start vectors and 60 for the norm.
_PRODUCTS = 2 * 300 + 60


def jacobian(context: Context) -> Object:
    """Spectral radius and norm of the step, with and without the identity bypass (Li, App. K)."""
    tokens = context.tokens.take(0, context.config.n_jacobian_prompts)
    return radius_study(
        context.on(tokens), rounded_exposed(context, PER_CHANNEL), with_bypass=_has_bypass(context)
    )


def _has_bypass(context: Context) -> bool:
    try:
        Bypass(context.system, context.n_steps)
    except ConfigError:
        return False
    return True


def _seconds(context: Context, step: float) -> float:
    # A product takes about as long as two steps. A map with many eigenvalues of equal size reaches the limit.
    n_prompts = min(context.config.n_jacobian_prompts, len(context.tokens.sequences))
    return n_prompts * (8 if context.exposed else 2) * _PRODUCTS * 2 * step


def _says(result: Found) -> str:
    """The spectral radius, with the acceptance of its estimates."""
    a, plain = result["acceptance"], result["states"]["plain"]
    text = f"spectral radius of a step: {a['n_accepted']} of {a['n_maps']} maps meet the acceptance rules"
    if plain["maps"]:
        radius, rounded = (plain["maps"][name]["radius"]["estimate"] for name in ("reference", "changed"))
        text += f"; mean {radius:.3f}, rounded {rounded:.3f} on {plain['n_accepted']} of {plain['n_prompts']} prompts"
    return (
        f"{text}; largest relative residual {a['largest_residual']:.1e}, largest disagreement of two starts "
        f"{a['largest_disagreement']:.1e}"
    )


SECTIONS.register("jacobian")(
    Section(jacobian, 90, loop="the Jacobian of a step", square=True, seconds=_seconds, says=_says)
)
