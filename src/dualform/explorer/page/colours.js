// The colours of the figures; on dark ground they are lifted, so that each can be told from it.

let classes = ["#332288"];
let series = ["#0077BB"];
export function take(run) { classes = run.colours.classes; series = run.colours.series; }
export const isDark = () => document.documentElement.dataset.theme === "dark";

export function colourOf(place) {
  const count = classes.length;
  return lifted(classes[((place % count) + count) % count]);
}
export const seriesColour = (place) => lifted(series[place % series.length]);

function parts(colour) { return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)); }
function lifted(colour) {
  if (!isDark()) return colour;
  const mixed = parts(colour).map((one) => Math.round(one + (255 - one) * 0.34));
  return `#${mixed.map((one) => one.toString(16).padStart(2, "0")).join("")}`;
}
export function inkOn(colour) {
  const [red, green, blue] = parts(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#1b1f24" : "#ffffff";
}
