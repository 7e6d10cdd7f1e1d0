"""Draw the README's picture, for light and dark pages: ``python docs/images/draw.py`` runs ``examples/cartpole.py`` for it."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.style

_HERE = Path(__file__).parent
_THEMES = {"light": "default", "dark": "dark_background"}

if __name__ == "__main__":
    sys.path.insert(0, str(_HERE.parents[1] / "examples"))
    import cartpole

    draw = cartpole.draw

    def draw_both(curve: list[tuple[float, float]], threshold: float, _file: str) -> None:
        """Take the place of the example's function: draw the same curve once for each theme."""
        for theme, style in _THEMES.items():
            with mpl.style.context([style, {"savefig.transparent": True}]):
                draw(curve, threshold, str(_HERE / f"learning-curve-{theme}.png"))

    cartpole.draw = draw_both
    sys.exit(cartpole.main())
