// A list of any length, of rows of one height: those in sight are elements, and no others. Scrolling makes the rows that
// come into sight within a slice of each frame, so that a frame is never longer for many of them.
const SLICE_MS = 4;
const BEYOND = 4; // rows above and below the window

class Windowed {
  constructor(scroller, rowHeight, makeElement) {
    this.scroller = scroller;
    this.rowHeight = rowHeight;
    this.makeElement = makeElement;
    this.count = 0;
    this.drawn = new Map();
    this.waits = false;
    this.space = make("div", "space");
    scroller.append(this.space);
    scroller.addEventListener("scroll", () => this.drawSoon());
    new ResizeObserver(() => this.drawSoon()).observe(scroller);
  }

  // `count` other rows than before.
  show(count) {
    this.count = count;
    this.space.style.height = (count * this.rowHeight) + "px";
    this.drawAnew();
  }

  drawAnew() {
    for (const element of this.drawn.values()) element.remove();
    this.drawn.clear();
    this.draw(Infinity);
  }

  // The row at `at` says something else.
  change(at) {
    const element = this.drawn.get(at);
    if (!element) return;
    const next = this.place(at);
    element.replaceWith(next);
    this.drawn.set(at, next);
  }

  // The row at `at` comes into sight, with as little motion as that takes, or at the top.
  reveal(at, atTop) {
    const top = at * this.rowHeight;
    const most = top + this.rowHeight - this.scroller.clientHeight;
    if (atTop || this.scroller.scrollTop > top) this.scroller.scrollTop = top;
    else if (this.scroller.scrollTop < most) this.scroller.scrollTop = most;
    this.draw(Infinity);
  }

  drawSoon() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; this.draw(SLICE_MS); });
  }

  draw(sliceMs) {
    const began = performance.now();
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.rowHeight) - BEYOND);
    const last = Math.min(this.count, first + Math.ceil(this.scroller.clientHeight / this.rowHeight) + 2 * BEYOND);
    for (const [at, element] of this.drawn) {
      if (at < first || at >= last) { element.remove(); this.drawn.delete(at); }
    }
    for (let at = first; at < last; at++) {
      if (this.drawn.has(at)) continue;
      if (performance.now() - began > sliceMs) { this.drawSoon(); return; }
      this.drawn.set(at, this.place(at));
      this.space.append(this.drawn.get(at));
    }
  }

  place(at) {
    const element = this.makeElement(at);
    element.style.top = (at * this.rowHeight) + "px";
    return element;
  }
}
