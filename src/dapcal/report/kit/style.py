"""How the page looks, in light, in dark and on paper, and the little that moves."""

from __future__ import annotations

_LIGHT = """
  --ground: #ffffff; --raised: #f5f6f8; --ink: #1b1f27; --soft: #596273; --rule: #dde1e8; --grid: #e8ebf0;
  --before: #8a6d1f; --after: #1f5fbf; --train: #7a8699; --held: #1f5fbf; --out: #c2410c; --out2: #7c3aad;
  --mark: #b3124e; --flag: #fbe6dc; --flag-ink: #8f2f08; color-scheme: light;
"""
_DARK = """
  --ground: #14171d; --raised: #1d222b; --ink: #e8ebf1; --soft: #a3adbd; --rule: #323a47; --grid: #262d38;
  --before: #d9b44a; --after: #74a9ff; --train: #8b97ab; --held: #74a9ff; --out: #ff9a62; --out2: #c79bff;
  --mark: #ff7aa5; --flag: #47281a; --flag-ink: #ffc5a5; color-scheme: dark;
"""

CSS = (
    f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {_DARK} }} }}
:root[data-theme=dark] {{ {_DARK} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 61rem; margin: 0 auto; padding: 0 1.1rem; }
header { padding-top: 1.6rem; }
.bar-top { display: flex; gap: 1rem; align-items: baseline; justify-content: space-between; }
.kicker { margin: 0; color: var(--soft); font-size: .85rem; letter-spacing: .02em; }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.2; margin: .1rem 0 .8rem; letter-spacing: -.015em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--rule);
  letter-spacing: -.01em; }
h3 { font-size: 1.02rem; margin: 0 0 .3rem; }
p { margin: .5rem 0; max-width: 44rem; }
.lead { font-size: 1.12rem; }
.short { border-left: 4px solid var(--after); background: var(--raised); padding: .8rem 1rem; margin: 1rem 0;
  max-width: 46rem; border-radius: 0 8px 8px 0; }
.small { color: var(--soft); font-size: .87rem; }
button { font: inherit; font-size: .87rem; color: var(--ink); background: var(--raised); cursor: pointer;
  border: 1px solid var(--rule); border-radius: 8px; padding: .35rem .8rem; white-space: nowrap; }
:focus-visible { outline: 3px solid var(--after); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; padding: 0; margin: 1rem 0 0; list-style: none;
  font-size: .92rem; }
a { color: var(--after); text-underline-offset: 2px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem 2rem;
  align-items: start; margin: 1rem 0; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; color: var(--soft); margin-top: .3rem; }
figcaption strong { color: var(--ink); }
.alone { max-width: 30rem; margin: 1rem 0; }
svg.chart, svg.colours { display: block; width: 100%; height: auto; }
.colours { max-width: 16rem; margin: .2rem 0; }
svg text { fill: var(--soft); font-size: 11px; font-family: inherit; }
svg .name { fill: var(--ink); }
svg .label { font-weight: 600; paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .start { text-anchor: start; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.ideal { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 4 4; }
.line.before { stroke: var(--before); } .line.after { stroke: var(--after); }
.line.before { stroke-dasharray: 6 3; }
.line.error { stroke-width: 1.4; stroke-dasharray: none; opacity: .7; }
.line.train { stroke: var(--train); stroke-width: 1.5; } .line.held { stroke: var(--held); }
.line.out { stroke: var(--out); stroke-dasharray: 7 2; } .line.out2 { stroke: var(--out2); stroke-dasharray: 2 2; }
.dot { stroke: var(--ground); stroke-width: 1; }
.dot.before, .bar.before { fill: var(--before); } .dot.after, .bar.after { fill: var(--after); }
.dot.out { fill: var(--out); } .dot.many { opacity: .55; }
.bar { opacity: .75; } .bar.soft { opacity: .45; }
.band { fill: var(--soft); opacity: .18; }
line.mark { stroke: var(--mark); stroke-width: 1.6; } svg text.mark { fill: var(--mark); }
line.limit { stroke: var(--out); stroke-width: 1.4; stroke-dasharray: 5 3; } svg text.limit { fill: var(--out); }
line.reference { stroke: var(--soft); stroke-dasharray: 2 3; } svg text.reference { fill: var(--soft); }
.point { fill: #ffffff; stroke: #111111; stroke-width: .8; } .point.other { fill: #111111; stroke: #ffffff; }
.frame { display: none; } .frame.on { display: inline; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .4rem 0; padding: 0; list-style: none;
  font-size: .88rem; color: var(--soft); }
.legend li::before { content: ""; display: inline-block; width: 1.5em; margin-right: .45em; vertical-align: .28em;
  border-top: 3px solid var(--soft); }
.legend .before::before { border-top: 3px dashed var(--before); } .legend .after::before { border-color: var(--after); }
.legend .train::before { border-color: var(--train); } .legend .held::before { border-color: var(--held); }
.legend .out::before { border-top: 3px dashed var(--out); }
.legend .out2::before { border-top: 3px dotted var(--out2); }
.legend .dots::before { width: .65em; height: .65em; border: 0; border-radius: 50%; vertical-align: 0; }
.legend .dots.after::before { background: var(--after); } .legend .dots.out::before { background: var(--out); }
.scroll { overflow-x: auto; margin: .8rem 0; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .87rem; padding-bottom: .3rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { font-size: .82rem; font-weight: 600; color: var(--soft); }
tbody th { font-weight: 500; }
.highest td, .highest th { padding: .25rem .8rem; white-space: nowrap; }
.highest td { max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
tr.far { background: var(--flag); } tr.far th, tr.far td { color: var(--flag-ink); }
.badge { font-size: .74rem; font-weight: 600; border: 1px solid currentColor; border-radius: 99px; padding: 0 .5em;
  margin-left: .5em; }
article { margin: 1.3rem 0 1.8rem; min-width: 0; }
.pictures { display: flex; flex-wrap: wrap; gap: .9rem; margin: .6rem 0; }
.pictures figure { width: 7rem; } .pictures figcaption { font-size: .8rem; line-height: 1.35; }
.pictures img { width: 7rem; height: 7rem; object-fit: contain; image-rendering: pixelated; background: var(--raised);
  border: 1px solid var(--rule); border-radius: 4px; }
.pictures .this img { border: 3px solid var(--mark); }
.slider { display: flex; flex-wrap: wrap; gap: .3rem .9rem; align-items: center; margin: .6rem 0; }
.slider input { flex: 1 1 12rem; min-width: 0; accent-color: var(--after); }
.slider output { flex: 1 1 100%; font-size: .92rem; min-height: 1.6em; }
ul.plain { padding-left: 1.1rem; max-width: 46rem; } ul.plain li { margin: .25rem 0; }
footer { color: var(--soft); font-size: .85rem; padding: 2rem 1.1rem 3rem; }
@media (max-width: 30rem) { body { font-size: 15px; } svg text { font-size: 12px; } }
@media (max-width: 40rem) {
  .highest, .highest tbody, .highest thead, .highest caption { display: block; }
  .highest tr { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); padding: .2rem 0; }
  .highest tbody th { grid-column: 1 / -1; padding: .2rem 0 0; }
  .highest thead th:first-child { display: none; }
  .highest td, .highest th { white-space: normal; overflow-wrap: anywhere; padding: .1rem .3rem .1rem 0; border: 0; }
  .highest tr { border-bottom: 1px solid var(--rule); }
}
@media print {
  :root, :root[data-theme=dark], :root:not([data-theme=light]) { """
    + _LIGHT
    + """ }
  button, nav, .slider input { display: none; }
  header, main, footer { max-width: none; } .scroll { overflow: visible; }
  figure, article, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
"""
)

SCRIPT = """
"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
const name = () => { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
prefersDark.addEventListener("change", name);
name();
const slider = document.getElementById("phi-range");
if (slider) {
  const frames = document.querySelectorAll(".frame");
  const words = document.querySelectorAll("#phi-words li");
  const output = document.getElementById("phi-output");
  const show = () => {
    frames.forEach((frame, place) => frame.classList.toggle("on", place === Number(slider.value)));
    output.textContent = words[slider.value].textContent;
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  slider.addEventListener("input", show);
  show();
}
"""
