"""The figures: data in, matplotlib Figure out. Nothing is computed here but layout, and no global state is touched."""

from odc_sim.plots_bars import idle_figure, lengths_figure, speedup_figure
from odc_sim.plots_style import save_png
from odc_sim.plots_timeline import Panel, timeline_figure

__all__ = ["Panel", "idle_figure", "lengths_figure", "save_png", "speedup_figure", "timeline_figure"]
