"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  // The tree of modules: a row is followed by its detail, then by the rows inside of it.
  const read = () => all("tr.module").map(row => ({
    row, detail: row.nextElementSibling, depth: Number(row.dataset.depth), text: row.dataset.search.toLowerCase(),
    fold: row.querySelector(".tree"), name: row.querySelector(".name"),
  }));
  let modules = read();
  document.getElementById("module-table").addEventListener("sorted", () => { modules = read(); });
  const search = document.getElementById("search"), found = document.getElementById("found");
  const isFolded = module => module.fold !== null && module.fold.getAttribute("aria-expanded") === "false";
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(word => word !== "");
    const matches = text => words.every(word => text.includes(word));
    const wanted = new Set();
    let count = 0;
    modules.forEach((module, i) => {
      if (words.length === 0 || !matches(module.text)) return;
      count += 1;
      wanted.add(i);
      for (let j = i, depth = module.depth; j >= 0 && depth > 0; j -= 1) {
        if (modules[j].depth < depth) { wanted.add(j); depth = modules[j].depth; }
      }
    });
    let hiddenBelow = Infinity;
    modules.forEach((module, i) => {
      let visible = words.length === 0 ? module.depth <= hiddenBelow : wanted.has(i);
      if (words.length === 0 && visible) hiddenBelow = isFolded(module) ? module.depth : Infinity;
      module.row.hidden = !visible;
      module.detail.hidden = !visible || module.name.getAttribute("aria-expanded") === "false";
    });
    all("#argument-table tbody tr").forEach(row => {
      const visible = words.length === 0 || matches(row.dataset.search.toLowerCase());
      row.hidden = !visible;
      if (words.length !== 0 && visible) count += 1;
    });
    found.textContent = words.length === 0 ? "" : count + " found";
  };
  modules.forEach(module => {
    module.name.addEventListener("click", () => {
      const open = module.name.getAttribute("aria-expanded") === "false";
      module.name.setAttribute("aria-expanded", String(open));
      module.row.classList.toggle("open", open);
      module.detail.hidden = !open;
    });
    if (module.fold !== null) {
      module.fold.addEventListener("click", () => {
        module.fold.setAttribute("aria-expanded", String(isFolded(module)));
        show();
      });
    }
  });
  const foldAll = folded => {
    modules.forEach(module => { if (module.fold !== null) module.fold.setAttribute("aria-expanded", String(!folded)); });
    show();
  };
  document.getElementById("fold").addEventListener("click", () => foldAll(true));
  document.getElementById("unfold").addEventListener("click", () => foldAll(false));
  search.addEventListener("input", show);
  search.addEventListener("keydown", event => { if (event.key === "Escape") { search.value = ""; show(); } });

  // The timeline.
  const source = document.getElementById("timeline-data");
  if (source === null) return;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("timeline"), readout = document.getElementById("readout");
  const links = document.getElementById("links"), pen = canvas.getContext("2d");
  const rows = data.rows.map(row => {
    const starts = [], durations = [], names = [];
    let last = 0;
    for (let i = 0; i < row.events.length; i += 3) {
      last += row.events[i + 1];
      names.push(row.events[i]); starts.push(last); durations.push(row.events[i + 2]);
    }
    return { name: row.name, link: row.link, busy: row.busy, starts, durations, names };
  });
  const colours = { F: "--forward", B: "--backward", W: "--weight", compute: "--compute", send: "--send" };
  const ROW = rows.length <= 16 ? 24 : 16, LABEL = 96, TOP = 18;
  links.checked = rows.filter(row => row.link).length <= 8;
  let from = 0, to = data.parts;
  const shown = () => rows.filter(row => links.checked || !row.link);
  const seconds = parts => {
    const value = parts / data.parts * data.step_s;
    if (value === 0) return "0";
    for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
      if (Math.abs(value) >= size) return (value / size).toPrecision(3) + " " + unit;
    }
    return (value / 1e-9).toPrecision(3) + " ns";
  };
  const draw = () => {
    const visible = shown(), width = canvas.clientWidth, height = TOP + visible.length * ROW + 2;
    const ratio = window.devicePixelRatio || 1, label = Math.min(LABEL, width / 4);
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name).trim();
    const fills = data.categories.map(category => colour(colours[category] || "--other"));
    const scale = (width - label) / (to - from);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    pen.fillStyle = colour("--soft");
    for (let i = 0; i < 5; i += 1) {
      const text = seconds(from + (to - from) * i / 5);
      pen.fillText(text, label + (width - label) * i / 5 + 2, 9);
    }
    visible.forEach((row, number) => {
      const y = TOP + number * ROW;
      pen.fillStyle = colour("--soft");
      pen.save(); pen.beginPath(); pen.rect(0, y, label - 4, ROW); pen.clip();
      pen.fillText(row.name, 2, y + ROW / 2); pen.restore();
      pen.save(); pen.beginPath(); pen.rect(label, y, width - label, ROW); pen.clip();
      let drawn = -1;
      for (let i = 0; i < row.starts.length; i += 1) {
        if (row.starts[i] > to) break;
        if (row.starts[i] + row.durations[i] < from) continue;
        const x = label + (row.starts[i] - from) * scale, wide = row.durations[i] * scale;
        if (x + wide < drawn + 0.5) continue;
        drawn = x + wide;
        pen.fillStyle = fills[row.names[i]];
        pen.fillRect(x, y + 2, Math.max(wide - (wide > 3 ? 1 : 0), 0.6), ROW - 4);
        if (wide > 60) {
          pen.fillStyle = colour("--axis-ink");
          pen.save(); pen.beginPath(); pen.rect(x, y, wide - 3, ROW); pen.clip();
          pen.fillText(data.names[row.names[i]], Math.max(x, label) + 3, y + ROW / 2); pen.restore();
        }
      }
      pen.restore();
    });
  };
  const zoom = (factor, at) => {
    const wide = Math.min(Math.max((to - from) * factor, 20), data.parts);
    const centre = at === undefined ? (from + to) / 2 : at, share = (centre - from) / (to - from);
    from = Math.min(Math.max(centre - share * wide, 0), data.parts - wide);
    to = from + wide; draw();
  };
  const move = share => {
    const by = Math.min(Math.max((to - from) * share, -from), data.parts - to);
    from += by; to += by; draw();
  };
  const place = event => {
    const box = canvas.getBoundingClientRect(), label = Math.min(LABEL, box.width / 4);
    return { part: from + (event.clientX - box.left - label) / (box.width - label) * (to - from),
             row: Math.floor((event.clientY - box.top - TOP) / ROW) };
  };
  const tell = event => {
    const at = place(event), row = shown()[at.row];
    if (row === undefined) return;
    const near = (to - from) / canvas.clientWidth;
    let text = row.name + ", busy for " + (100 * row.busy).toFixed(1) + " % of the step";
    for (let i = 0; i < row.starts.length; i += 1) {
      if (row.starts[i] - near > at.part) break;
      if (row.starts[i] + row.durations[i] + near >= at.part) {
        text = row.name + ": " + data.names[row.names[i]] + ", " + seconds(row.durations[i]) + " from " + seconds(row.starts[i]);
      }
    }
    readout.textContent = text;
  };
  const actions = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25),
                    all: () => { from = 0; to = data.parts; draw(); } };
  all("[data-zoom]").forEach(button => button.addEventListener("click", actions[button.dataset.zoom]));
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all" };
  canvas.addEventListener("keydown", event => {
    if (keys[event.key] !== undefined) { event.preventDefault(); actions[keys[event.key]](); }
  });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault(); zoom(event.deltaY < 0 ? 0.8 : 1.25, place(event).part);
  }, { passive: false });
  let dragged = null;
  canvas.addEventListener("pointerdown", event => { dragged = event.clientX; canvas.setPointerCapture(event.pointerId); tell(event); });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", event => {
    if (dragged === null) { tell(event); return; }
    const wide = canvas.clientWidth - Math.min(LABEL, canvas.clientWidth / 4);
    move((dragged - event.clientX) / wide); dragged = event.clientX;
  });
  links.addEventListener("change", draw);
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
