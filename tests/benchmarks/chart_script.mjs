// Runs the charts' script, which comes in on stdin, on a document of six points: two series of three.
// Each element is as much of a browser's as the script touches. A failed assertion ends it with 1.
import assert from "node:assert";
import { readFileSync } from "node:fs";

class Element {
  constructor(rectangle = [0, 0, 10, 10]) {
    const [left, top, width, height] = rectangle;
    this.box = { left, top, width, height, right: left + width, bottom: top + height };
    this.attributes = {}; this.dataset = {}; this.style = {}; this.handlers = {};
    const names = new Set();
    this.classList = {
      add: (name) => names.add(name), remove: (name) => names.delete(name),
      contains: (name) => names.has(name),
      toggle: (name, on) => (on ? names.add(name) : names.delete(name)),
    };
  }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getBoundingClientRect() { return this.box; }
  addEventListener(name, handler) { this.handlers[name] = handler; }
  fire(name, event = {}) { this.handlers[name]({ preventDefault() {}, ...event }); }
  focus() { document.activeElement?.fire("blur"); document.activeElement = this; this.fire("focus"); }
  append() {}
  remove() { this.removed = true; }
  closest() { return this; }
}

const title = new Element();
const point = (series, place, left) => {
  const made = new Element([left, 100, 10, 10]);
  Object.assign(made.dataset, { series, place: String(place) });
  made.attributes["aria-label"] = `${series} ${place}`;
  made.querySelector = () => title;
  return made;
};
const points = ["p50", "p99"].flatMap(
  (series, row) => [0, 1, 2].map((place) => point(series, place, 100 * place + 40 * row)));
const [svg, keys, legend, chart, button] = Array.from({ length: 5 }, () => new Element());
keys.hidden = true;
button.dataset.series = "p50";
button.attributes["aria-pressed"] = "true";
chart.querySelector = (what) => ({ svg, ".keys": keys })[what] ?? legend;
chart.querySelectorAll = () => points;
const tip = new Element([0, 0, 80, 20]);
globalThis.document = {
  body: new Element(), documentElement: { clientWidth: 390 },
  createElement: () => tip, querySelectorAll: () => [chart], activeElement: null,
};
let scroll;
globalThis.addEventListener = (_, handler) => { scroll = handler; };

new Function(readFileSync(0, "utf8"))();
assert(!keys.hidden && legend.classList.contains("off") && title.removed && tip.hidden);
const stops = () => points.filter((one) => one.attributes.tabindex === "0");
assert.deepEqual(stops(), [points[0]], "one stop of the Tab key");

svg.fire("pointermove", { clientX: 215, clientY: 112 });
assert(!tip.hidden && tip.textContent === "p50 2" && points[2].classList.contains("shown"));
assert.equal(tip.style.top, "72px");
svg.fire("pointermove", { clientX: 390, clientY: 300 });
assert(tip.hidden && !points[2].classList.contains("shown"), "nothing is near");

points[0].focus();
assert.equal(tip.textContent, "p50 0");
assert.equal(tip.style.left, "8px", "inside the window");
points[0].box = { ...points[0].box, left: 100, top: 60 };
scroll();
assert(!tip.hidden && tip.style.left === "65px", "it goes along when its point is scrolled to");
points[0].fire("keydown", { key: "ArrowRight" });
assert(document.activeElement === points[1] && tip.textContent === "p50 1");
points[1].fire("keydown", { key: "ArrowDown" });
assert(document.activeElement === points[4] && tip.textContent === "p99 1");
points[4].fire("keydown", { key: "End" });
points[5].fire("keydown", { key: "ArrowRight" });
assert(document.activeElement === points[5] && stops()[0] === points[5], "the last one stays");
points[5].fire("keydown", { key: "Escape" });
assert(tip.hidden);

keys.fire("click", { target: button });
assert.equal(button.attributes["aria-pressed"], "false");
assert(points.slice(0, 3).every((one) => one.classList.contains("off")));
assert(stops()[0] === points[3], "what is off cannot be reached");
svg.fire("pointermove", { clientX: 205, clientY: 105 });
assert(tip.hidden, "nor pointed at");
keys.fire("click", { target: button });
assert(!points[0].classList.contains("off"));
svg.fire("pointermove", { clientX: 215, clientY: 112 });
scroll();
assert(tip.hidden, "of what only a pointer showed nothing stays");
