"""Interactive charts for the page of a sweep: buttons, style and a script.

The page is complete without the script: the pictures have a legend and titles, and the buttons are
hidden. The script shows the nearest point's values to a pointer and to the keyboard (one stop of
the Tab key a chart; arrows, Home and End move, Escape closes), and switches series off and on.
"""

from html import escape

from benchmarks.store_sweep.pages.charts import Chart


def figure(chart: Chart, title: str) -> str:
    """`chart` with its buttons, in a frame that scrolls on a narrow screen."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{escape(name)}">'
        f'<i style="background: {colour}"></i>{escape(name)}</button>'
        for name, colour in chart.series.items()
    )
    picture = chart.svg.replace("<svg", f'<svg role="group" aria-label="{escape(title)}"', 1)
    return (
        f'<figure class="chart"><div class="keys" role="group" aria-label="series" hidden>{buttons}'
        f'</div><div class="wide">{picture}</div></figure>'
    )


STYLE = """
.chart { margin: 0 }
.keys { display: flex; flex-wrap: wrap; gap: .4rem; margin: .4rem 0 }
.keys[hidden], .tip[hidden], .off { display: none }
.keys button { font: inherit; color: var(--ink); background: var(--soft); cursor: pointer;
  border: 1px solid var(--line); border-radius: .4rem; padding: .35rem .7rem; min-height: 2.2rem }
.keys button[aria-pressed=false] { color: var(--quiet); text-decoration: line-through }
.keys button[aria-pressed=false] i { opacity: .25 }
.keys i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.keys button:focus-visible, .point:focus-visible { outline: 2px solid var(--ink);
  outline-offset: 2px }
.point.shown { filter: brightness(1.25) drop-shadow(0 0 2px var(--ink)) }
.tip { position: fixed; z-index: 1; pointer-events: none; padding: .3rem .6rem;
  border-radius: .4rem; max-width: min(20rem, calc(100vw - 1rem));
  box-sizing: border-box; color: var(--ground);
  background: var(--ink); font-size: .9rem; font-variant-numeric: tabular-nums }
"""

SCRIPT = """
(() => {
  const EDGE = 8, REACH = 24;
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  let shown = null;
  const hide = () => {
    if (shown) shown.classList.remove("shown");
    shown = null; tip.hidden = true;
  };
  const show = (point) => {
    if (point === shown) return;
    hide();
    shown = point; point.classList.add("shown");
    tip.textContent = point.getAttribute("aria-label"); tip.hidden = false;
    place(point);
  };
  const place = (point) => {
    const at = point.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const right = Math.max(EDGE, document.documentElement.clientWidth - box.width - EDGE);
    const left = Math.min(right, Math.max(EDGE, at.left + (at.width - box.width) / 2));
    const above = at.top - box.height - EDGE;
    tip.style.left = left + "px";
    tip.style.top = (above < EDGE ? at.bottom + EDGE : above) + "px";
  };
  const distance = (point, x, y) => {
    const at = point.getBoundingClientRect();
    const across = Math.max(at.left - x, 0, x - at.right);
    return Math.hypot(across, Math.max(at.top - y, 0, y - at.bottom));
  };
  const start = (chart) => {
    const svg = chart.querySelector("svg"), keys = chart.querySelector(".keys");
    const points = [...chart.querySelectorAll(".point")];
    const visible = () => points.filter((point) => !point.classList.contains("off"));
    const rove = (to) => points.forEach(
      (point) => point.setAttribute("tabindex", point === to ? "0" : "-1"));
    const move = (from, key) => {
      const own = visible().filter((point) => point.dataset.series === from.dataset.series);
      const beside = visible().filter((point) => point.dataset.place === from.dataset.place);
      const step = {ArrowRight: [own, 1], ArrowLeft: [own, -1], ArrowDown: [beside, 1],
                    ArrowUp: [beside, -1]}[key];
      if (key === "Home") return own[0];
      if (key === "End") return own[own.length - 1];
      return step && step[0][step[0].indexOf(from) + step[1]];
    };
    points.forEach((point) => {
      point.querySelector("title").remove();
      point.addEventListener("focus", () => { rove(point); show(point); });
      point.addEventListener("blur", hide);
      point.addEventListener("keydown", (event) => {
        if (event.key === "Escape") return hide();
        const next = move(point, event.key);
        if (next) { event.preventDefault(); next.focus(); }
      });
    });
    rove(points[0]);
    const look = (event) => {
      const near = visible().map((point) => [distance(point, event.clientX, event.clientY), point]);
      const best = near.sort((one, other) => one[0] - other[0])[0];
      if (best && best[0] <= REACH) show(best[1]); else hide();
    };
    svg.addEventListener("pointermove", look);
    svg.addEventListener("pointerdown", look);
    svg.addEventListener("pointerleave", hide);
    keys.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const off = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!off));
      points.filter((point) => point.dataset.series === button.dataset.series)
        .forEach((point) => point.classList.toggle("off", off));
      hide();
      rove(visible()[0]);
    });
    keys.hidden = false;
    const legend = chart.querySelector("[id$='-legend']");
    if (legend) legend.classList.add("off");
  };
  document.querySelectorAll(".chart").forEach(start);
  const scrolled = () => {
    if (shown && shown === document.activeElement) place(shown); else hide();
  };
  addEventListener("scroll", scrolled, {passive: true, capture: true});
})();
"""
