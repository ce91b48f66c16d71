// Runs the script of a page on a DOM that has what the page uses and nothing that makes markup of text.
// Standard input: {"script", "elements": {id: text}, "keys": [[key, ...], ...]}. Standard output: what stands in the
// page after each of `keys`, as {id: text}, and the number of tokens that are elements.
"use strict";
const vm = require("node:vm");
const given = JSON.parse(require("node:fs").readFileSync(0, "utf8"));

class Element {
  constructor(tag) {
    Object.assign(this, { tagName: tag.toUpperCase(), children: [], own: "", className: "", style: {}, listeners: {} });
    Object.assign(this, { value: "", hidden: false, scrollTop: 0, clientHeight: 400 });
    this.classList = { add: (name) => { this.className += " " + name; } };
  }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.own = String(text); this.children = []; }
  set innerHTML(text) { throw new Error("markup: " + text); }
  append(...children) {
    for (const child of children) child.parent = this;
    this.children.push(...children);
  }
  remove() { this.parent.children = this.parent.children.filter((child) => child !== this); }
  replaceChildren(...children) { this.own = ""; this.children = children; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  focus() {}
  blur() {}
}

const elements = {};
const listeners = {};
const document = {
  createElement: (tag) => new Element(tag),
  addEventListener: (name, listener) => { listeners[name] = listener; },
  getElementById: (id) => {
    if (!elements[id]) {
      elements[id] = new Element("div");
      elements[id].own = given.elements[id] || "";
    }
    return elements[id];
  },
};
const page = vm.createContext({ document, atob });
const all = (element) => [element, ...element.children.flatMap(all)];
vm.runInContext(given.script, page);
const seen = given.keys.map((keys) => {
  for (const key of keys) listeners.keydown({ key, target: null, preventDefault() {} });
  const texts = Object.fromEntries(Object.entries(elements).filter(([id]) => !given.elements[id]).map(([id, element]) => [id, element.textContent]));
  const tokens = elements.space ? all(elements.space).filter((each) => each.className.startsWith("token")) : [];
  const values = tokens.map((each) => { each.listeners.mouseenter(); return elements.value.textContent; });
  const classes = tokens.map((each) => each.className);
  return { texts, values, classes };
});
console.log(JSON.stringify({ seen, owned: page.owned === undefined ? null : page.owned }));
