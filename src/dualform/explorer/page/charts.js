// Charts by Plotly, whose script is fetched when the first chart is needed.
import { h } from "./dom.js";
import { colourOf, seriesColour } from "./colours.js";

let loading = null;
function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/page/plotly.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("Plotly's script could not be loaded.")));
    document.head.append(script);
  });
  return loading;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(place, traces, layout, label) {
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  const ink = style("--faint"), rule = style("--rule");
  const axis = { gridcolor: rule, zerolinecolor: ink, zerolinewidth: 1, tickfont: { size: 11 }, title: { font: { size: 11 }, standoff: 4 }, automargin: true, fixedrange: false };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 8, t: 6, b: 8 }, font: { color: ink, family: "inherit", size: 11 },
    showlegend: false, hovermode: "closest", hoverlabel: { font: { size: 12 } }, ...layout,
    xaxis: { ...axis, ...layout.xaxis, title: { ...axis.title, text: layout.xaxis?.title ?? "" } }, yaxis: { ...axis, ...layout.yaxis, title: { ...axis.title, text: layout.yaxis?.title ?? "" } },
  };
  // Data may come from anybody: Plotly understands some tags in names, so none may begin
  for (const trace of traces) if (trace.name) trace.name = String(trace.name).replaceAll("<", "‹").replaceAll(">", "›");
  plotly().then((Plotly) => { if (place.isConnected) Plotly.react(place, traces, merged, { displayModeBar: false, responsive: true }); })
    .catch((error) => { place.textContent = error.message; });
}

// Drawn once it is on the page and, of many, when it comes into sight.
function chart(className, make) {
  const place = h("div", { class: `chart ${className}` });
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); make(place); }
  }, { rootMargin: "200px" }).observe(place);
  return place;
}

export const loss = (series) => chart("tall", (place) => draw(place, series.map((one, number) => ({
  x: one.steps, y: one.values, name: one.name, mode: "lines", line: { color: seriesColour(number), width: 2 }, hovertemplate: `step %{x:.0f}: %{y:.4g}<extra></extra>`,
})), { xaxis: { title: "step" }, yaxis: { title: series.map((one) => one.name).join(", "), rangemode: "tozero" }, showlegend: series.length > 1 },
`Recorded over the steps: ${series.map((one) => one.name).join(", ")}`));

export const curves = (found, label) => chart("", (place) => draw(place, found.curves.map((curve) => ({
  x: found.ranks.slice(0, curve.values.length), y: curve.values, name: curve.name, mode: "lines", line: { color: colourOf(curve.colour), width: 1.8 },
  hovertemplate: "%{fullData.name}, rank %{x}: %{y:.4g}<extra></extra>",
})), { xaxis: { title: "rank within the class" }, yaxis: { title: label } }, `The best 500 slots of each class, ${label}`));

// Ranges for bars and line with their zeros at the same height.
function ranges(time) {
  const sizes = [[...time.positive, ...time.negative], time.cumulative].map((some) => [Math.max(0, ...some) || 1e-12, -Math.min(0, ...some)]);
  const rises = sizes.some(([up]) => up > 1e-12), sinks = Math.max(...sizes.map(([up, down]) => down / (up + down)));
  const below = rises ? Math.min(sinks, 0.75) : sinks; // a line that only sinks leaves room for bars that rise
  return sizes.map(([up, down]) => { const whole = 1.08 * Math.max(up / (1 - below || 1e-9), below ? down / below : 0); return [-below * whole, (1 - below) * whole]; });
}

export const timeline = (time, label) => chart("", (place) => draw(place, [
  { x: time.steps, y: time.positive, type: "bar", name: "adds", marker: { color: style("--bar") }, hovertemplate: "around step %{x:.0f}: +%{y:.4g}<extra></extra>" },
  { x: time.steps, y: time.negative, type: "bar", name: "takes away", marker: { color: style("--minus") }, hovertemplate: "around step %{x:.0f}: %{y:.4g}<extra></extra>" },
  { x: time.steps, y: time.cumulative, mode: "lines", name: "so far", yaxis: "y2", line: { color: style("--ink"), width: 1.6 }, hovertemplate: "up to step %{x:.0f}: %{y:.4g}<extra></extra>" },
], { barmode: "relative", bargap: 0.05, xaxis: { title: "step of training" }, yaxis: { title: label, range: ranges(time)[0], nticks: 6 },
  yaxis2: { overlaying: "y", side: "right", showgrid: false, zeroline: false, tickfont: { size: 11 }, automargin: true, tickmode: "auto", nticks: 5, range: ranges(time)[1] } },
`When it was written: sums of ${label} over stretches of steps, and the sum so far`));
