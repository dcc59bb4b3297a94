/* The page's script: a crosshair with values, and zoom along the steps, in all plots together. It loads nothing.
 *
 * Drag: zoom. Double click, or Escape: the whole run. Arrow keys: from point to point; + and -: closer, farther.
 * A heat map whose columns are no steps ("own" says what they are) has a crosshair of its own and no zoom.
 * What part is shown stands in the address behind '#', so that it outlives a reload and can be passed on. Only a page
 * of `--serve` asks for something: its own server, whether the run has gone on.
 */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("plot-data").textContent);
  const W = 1000, H = 400, NS = "http://www.w3.org/2000/svg", NARROW = 560, MOST_TOLD = 12;
  let view = null, cursor = null;  // [first step, last step], null: all; the step under the crosshair

  // numbers, as text.py and axes.py write them
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
  const trim = (v, digits) => String(parseFloat(v.toPrecision(digits)));
  const scaled = (v, units) => {
    for (const [size, letter] of units) {  // 999,999 is 1M
      if (Math.abs(v) >= (size > 1024 ? 0.9995 : 1) * size) return trim(v / size, 3) + letter;
    }
    return trim(v, 4);
  };
  const count = v => scaled(v, [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]);
  const BYTES = [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]];
  const write = {
    plain: v => {
      if (Math.abs(v) >= 9999.5) return count(v);
      return v !== 0 && Math.abs(v) < 1e-4 ? power(v) : trim(v, 4);
    },
    percent: v => trim(100 * v, 3) + "%",
    size: v => scaled(v, BYTES),
    seconds: v => {
      if (v > 0 && v < 1e-3) return trim(v * 1e6, 3) + "us";
      if (v < 0.1) return trim(v * 1e3, 3) + "ms";
      return v < 60 ? trim(v, 3) + "s" : trim(v / 60, 3) + "m";
    },
    count,
  };
  const whole = v => Math.round(v).toString().replace(/\B(?=(\d{3})+$)/g, ",");
  const linear = (low, high, most) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(s => s * power).find(s => s >= rough * (1 - 1e-9)), found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) {
      found.push(parseFloat((n * step).toPrecision(12)));
    }
    return found;
  };
  const logarithmic = (low, high, most) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const stride = Math.max(1, Math.ceil((last - first) / most));
    let found = [];
    for (const factors of [[1], [1, 2, 5]]) {
      found = [];
      for (let n = first; n <= last; n += stride) for (const factor of factors) {
        const at = factor * 10 ** n;
        if (at >= low * (1 - 1e-9) && at <= high * (1 + 1e-9)) found.push(at);
      }
      if (found.length >= 3) return found;
    }
    return linear(low, high, most);
  };
  const sizes = (low, high, most) => {  // multiples of a power of two
    if (!(high > low)) return [low];
    const step = 2 ** Math.ceil(Math.log2((high - low) / most) - 1e-9), found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) found.push(n * step);
    return found;
  };
  const ticks = (d, low, high) => {
    if (d.log) return logarithmic(low, high, 7);
    return d.numbers === "size" ? sizes(low, high, 7) : linear(low, high, 7);
  };

  const power = v => v.toExponential(2).replace(/\.?0+e/, "e");
  const exact = v => {
    const [size, letter] = BYTES.find(([size]) => Math.abs(v) >= size) ?? [1, " B"];
    return trim(v / size, 6) + letter;
  };
  const texts = (d, values) => {  // beside the axis
    const others = values.filter(v => v !== 0).map(Math.abs);
    const small = d.numbers === "plain" && others.length && Math.min(...others) < 1e-4 && Math.max(...others) < 1e-2;
    const say = small ? power : d.numbers === "size" ? exact : write[d.numbers];
    return values.map(v => v === 0 ? "0" : say(v));
  };

  // places
  const below = (xs, x) => {  // how many are smaller
    let low = 0, high = xs.length;
    while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
    return low;
  };
  const nearest = (xs, x) => {
    const i = below(xs, x);
    return i > 0 && (i === xs.length || x - xs[i - 1] < xs[i] - x) ? i - 1 : i;
  };
  const seen = p => p.d.own ? p.d.x : view ?? p.d.x;
  const px = (p, x) => { const [low, high] = seen(p); return W * (x - low) / (high - low); };
  const f = n => String(Math.round(n * 10) / 10);

  const plots = [...document.querySelectorAll(".plot")].map(figure => {
    const area = figure.querySelector(".area"), svg = area.querySelector("svg"), d = data.plots[figure.dataset.number];
    const of = names => [...svg.querySelectorAll(names)];
    const p = {
      d, area, grid: svg.querySelector(".grid"), bands: of(".band"), marks: of(".mark"),
      lines: of(".line,.faint,.dash,.dots,.gone,.limit"),
      cells: d.heat ? of("path") : [],
      readout: document.createElement("output"), own: null,  // the column under a crosshair of its own
    };
    p.readout.className = "readout";
    figure.querySelector("figcaption").append(p.readout);
    for (const name of ["cursor", "select"]) {
      p[name] = svg.appendChild(document.createElementNS(NS, "path"));
      p[name].setAttribute("class", name);
    }
    return p;
  });

  // drawing
  const range = p => {  // the values' axis, fitted to what is seen
    if (view === null) return p.d.y;
    let low = Infinity, high = -Infinity;
    const see = (x, y) => {
      if (x < view[0] || x > view[1] || p.d.log && !(y > 0)) return;
      low = Math.min(low, y); high = Math.max(high, y);
    };
    for (const line of p.d.lines) line.x.forEach((x, j) => see(x, line.y[j]));
    for (const band of p.d.bands) band.x.forEach((x, j) => { see(x, band.l[j]); see(x, band.h[j]); });
    if (low > high) return p.d.y;
    if (p.d.log) { const room = high > low ? (high / low) ** 0.04 : 1.5; return [low / room, high * room]; }
    if (p.d.zero) low = Math.min(low, 0);
    const room = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
    return [p.d.zero && low === 0 ? 0 : low - room, high + room];
  };
  const label = (p, kind, side, at, text) => {
    const span = document.createElement("span");
    span.className = kind; span.style[side] = at + "%"; span.textContent = text;
    p.area.append(span);
  };
  const path = (p, line, py) => {
    const [low, high] = seen(p), parts = [];
    const from = Math.max(below(line.x, low) - 1, 0), to = Math.min(below(line.x, high) + 1, line.x.length);
    for (let j = from; j < to; j++) parts.push(f(px(p, line.x[j])) + " " + f(py(line.y[j])));
    if (line.s === "dots" || parts.length === 1) return parts.map(part => `M${part}h0`).join("");
    return parts.length ? "M" + parts.join("L") : "";
  };
  const redraw = p => {
    if (p.d.own) return;
    p.area.querySelectorAll(".tx" + (p.d.heat ? "" : ",.ty")).forEach(old => old.remove());
    const [first, last] = seen(p);
    for (const at of linear(first, last, p.area.clientWidth < 420 ? 3 : 5)) {
      const place = px(p, at) / W;
      if (Number.isInteger(at)) label(p, place > 0.97 ? "tx end" : "tx", "left", place * 100, whole(at));
    }
    if (p.d.heat) {
      const stretch = (p.d.x[1] - p.d.x[0]) / (last - first), shift = W * (p.d.x[0] - first) / (last - first);
      for (const cell of p.cells) cell.setAttribute("transform", `translate(${shift} 0) scale(${stretch} 1)`);
      return;
    }
    const [low, high] = range(p), of = p.d.log ? v => Math.log(Math.max(v, 1e-300)) : v => v;
    const py = y => H * (1 - clamp((of(y) - of(low)) / (of(high) - of(low)), -1, 2));
    const ys = ticks(p.d, low, high), said = texts(p.d, ys);
    ys.forEach((at, j) => label(p, "ty", "top", py(at) / H * 100, said[j]));
    p.grid.setAttribute("d", ys.map(at => `M0 ${f(py(at))}H${W}`).join(""));
    p.d.lines.forEach((line, j) => p.lines[j].setAttribute("d", path(p, line, py)));
    p.d.bands.forEach((band, j) => {
      const edge = ys => band.x.map((x, n) => f(px(p, x)) + " " + f(py(ys[n])));
      p.bands[j].setAttribute("d", "M" + [...edge(band.h), ...edge(band.l).reverse()].join("L") + "Z");
    });
    p.d.marks.forEach((mark, j) => p.marks[j].setAttribute("d", `M${f(px(p, mark.x))} 0V${H}`));
  };

  // values under the crosshair
  const values = (p, cursor) => {
    const [low, high] = seen(p), reach = (high - low) / 60 + 1;
    if (p.d.heat) {
      const { x, v, names } = p.d.heat, j = nearest(x, cursor);
      const column = v.map((row, n) => [row[j], names[n]]).filter(cell => cell[0] !== null);
      if (!column.length) return "";
      column.sort((a, b) => a[0] - b[0]);
      const say = ([value, name]) => `${write.plain(value)} (${name})`;
      return `${p.d.own ?? "step"} ${whole(x[j])}: lowest ${say(column[0])}, highest ${say(column[column.length - 1])}`;
    }
    const told = [];
    for (const line of p.d.lines) {
      const same = p.d.lines.filter(other => other.n === line.n && other.c === line.c);
      const first = same.find(other => other.s === "line" || other.s === "dash") ?? same[0];
      if (line !== first && line.s !== "gone") continue;
      const j = nearest(line.x, cursor), sparse = line.s === "dots" || line.s === "dash" || line.x.length < 40;
      if (line.s === "limit" || Math.abs(line.x[j] - cursor) <= (sparse ? 6 : 1) * reach) {
        told.push(`${line.n} ${write[p.d.numbers](line.y[j])}`);
      }
    }
    for (const band of p.d.bands) {
      const j = nearest(band.x, cursor), say = write[p.d.numbers];
      if (cursor >= band.x[0]) told.push(`${band.n} ${say(band.l[j])} to ${say(band.h[j])}`);
    }
    const near = p.d.marks.filter(mark => Math.abs(mark.x - cursor) < reach / 2).map(mark => mark.t);
    if (told.length > MOST_TOLD) told.splice(MOST_TOLD, Infinity, `and ${told.length - MOST_TOLD} more`);
    return told.length + near.length ? `step ${whole(cursor)}: ` + [...told, ...near.slice(0, 2)].join(" \u00b7 ") : "";
  };
  const tell = (p, x) => {
    p.readout.textContent = x === null ? "" : values(p, x);
    p.cursor.setAttribute("d", x === null ? "" : `M${f(px(p, x))} 0V${H}`);
  };
  const point = (x, p) => {
    if (p?.d.own) { p.own = x; return tell(p, x); }
    cursor = x;
    for (const other of plots) if (!other.d.own) tell(other, x);
  };

  // zoom
  const reset = document.getElementById("reset");
  const end = Math.max(...plots.filter(p => !p.d.own).map(p => p.d.x[1]), 1);
  const show = wanted => {
    if (wanted !== null) {
      let [low, high] = wanted;
      const least = Math.min(4, end);
      if (high - low < least) { low = (low + high - least) / 2; high = low + least; }
      low = Math.max(low, 0); high = Math.min(high, end);
      if (!(high > low)) return;
      wanted = low > 0 || high < end ? [low, high] : null;
    }
    view = wanted;
    plots.forEach(redraw);
    point(cursor);
    reset.hidden = view === null;
    const place = view ? `#x=${Math.round(view[0])}-${Math.round(view[1])}` : location.pathname + location.search;
    try { history.replaceState(null, "", place); } catch (error) { /* some browsers keep a file's address as it is */ }
  };
  const closer = (p, factor) => {
    if (p.d.own) return;
    const [low, high] = seen(p), middle = cursor ?? (low + high) / 2, half = (high - low) * factor / 2;
    show([middle - half, middle + half]);
  };
  const walk = (p, forwards) => {
    const xs = p.d.heat ? p.d.heat.x : (p.d.lines.find(line => line.s !== "limit" && line.s !== "gone") ?? { x: [] }).x;
    if (!xs.length) return;
    const [low, high] = seen(p), at = p.d.own ? p.own : cursor;
    const start = forwards ? below(xs, low) : below(xs, high) - 1;
    const j = clamp(at === null ? start : nearest(xs, at) + (forwards ? 1 : -1), 0, xs.length - 1);
    if (xs[j] < low || xs[j] > high) show([xs[j] - (high - low) / 2, xs[j] + (high - low) / 2]);
    point(xs[j], p);
  };
  for (const p of plots) {
    let from = null;  // [pixel, step] where the pointer went down
    const at = event => {
      const box = p.area.getBoundingClientRect(), [low, high] = seen(p);
      return low + clamp((event.clientX - box.left) / box.width, 0, 1) * (high - low);
    };
    const dragged = event => from !== null && Math.abs(event.clientX - from[0]) > 6;
    p.area.addEventListener("pointerdown", event => {
      if (event.button !== 0 || p.d.own) return;
      from = [event.clientX, at(event)];
      p.area.setPointerCapture(event.pointerId);
    });
    p.area.addEventListener("pointermove", event => {
      point(at(event), p);
      if (!dragged(event)) return;
      const [a, b] = [px(p, from[1]), px(p, at(event))].map(f);
      p.select.setAttribute("d", `M${a} 0H${b}V${H}H${a}Z`);
    });
    const up = event => {
      p.select.setAttribute("d", "");
      if (event.type === "pointerup" && dragged(event)) show([from[1], at(event)].sort((a, b) => a - b));
      from = null;
    };
    p.area.addEventListener("pointerup", up);
    p.area.addEventListener("pointercancel", up);
    p.area.addEventListener("pointerleave", () => { if (from === null) point(null, p); });
    p.area.addEventListener("dblclick", () => show(null));
    p.area.addEventListener("blur", () => point(null, p));
    p.area.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;  // the browser's own
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") walk(p, event.key === "ArrowRight");
      else if (event.key === "+" || event.key === "=") closer(p, 0.5);
      else if (event.key === "-") closer(p, 2);
      else if (event.key === "Escape" || event.key === "0") show(null);
      else return;
      event.preventDefault();
    });
  }
  reset.addEventListener("click", () => show(null));

  const asked = /^#x=(\d+)-(\d+)$/.exec(location.hash);
  if (asked) show([Number(asked[1]), Number(asked[2])]);
  let width = window.innerWidth;
  if (width < NARROW) plots.forEach(redraw);  // fewer labels than were written for a wide page
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; plots.forEach(redraw); }
  });

  if (data.version) {
    const look = async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        const idle = cursor === null && !document.hidden;
        if (answer.ok && await answer.text() !== data.version && idle) location.reload();
      } catch (error) { /* the server has ended: the page stays as it is */ }
    };
    setInterval(look, 3000);
  }
})();
