"use strict";
// The dashboard of a sidecar: it fetches what the routes below /v1 have, and shows it. Text of
// others (names of models, errors) goes into the page as text only. While the page is hidden or
// paused, nothing is fetched.
(() => {
  const statusEveryMs = 2000; // also how often a sidecar that is gone is tried again
  const slowEveryMs = 6000;   // the list of sidecars, and the map
  const patienceMs = 5000;
  const remembered = 300;     // samples of a chart: ten minutes
  const windowMs = 60000;     // that a point of the hit ratios is of
  const colors = 8;           // --c0 to --c7
  const tokenKey = "lookaside-token";

  const $ = (id) => document.getElementById(id);

  // --- How values are written.
  const grouped = new Intl.NumberFormat("en-US");
  const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
  const count = (n) => (Math.abs(n) < 1e7 ? grouped.format(n) : short.format(n));
  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let i = 0;
    for (; Math.abs(n) >= 1024 && i < units.length - 1; i++) n /= 1024;
    return `${i && Math.abs(n) < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
  }
  const percent = (part, of) => (of > 0 ? `${(100 * part / of).toFixed(1)} %` : "–");
  function seconds(s) { // a line does not break before the unit
    const a = Math.abs(s);
    if (a >= 36000) return `${(s / 3600).toFixed(1)}\u00a0h`;
    if (a >= 600) return `${(s / 60).toFixed(1)}\u00a0min`;
    if (a >= 1) return `${s.toFixed(1)}\u00a0s`;
    if (a >= 1e-3 || a === 0) return `${(s * 1000).toFixed(a === 0 ? 0 : 1)}\u00a0ms`;
    return `${(s * 1e6).toFixed(0)}\u00a0µs`;
  }
  function uptime(s) {
    const d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
    if (d) return `${d} d ${h} h`;
    if (h) return `${h} h ${m} min`;
    return m ? `${m} min` : `${Math.floor(s)} s`;
  }
  const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

  // --- The page's elements. What is there is changed in place, so that focus and scrolling stay.
  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }
  function setClass(node, name) {
    if (node.className !== name) node.className = name;
  }
  // put writes a value; raw is the number as the sidecar has it.
  function put(id, text, raw) {
    setText($(id), text);
    if (raw !== undefined) $(id).dataset.raw = String(raw);
  }
  function make(tag, name) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    return node;
  }
  // list keeps the children of parent in step with items, by their keys.
  function list(parent, items, key, create, update) {
    const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
    items.forEach((item, i) => {
      const k = String(key(item, i));
      let node = old.get(k);
      old.delete(k);
      if (!node) {
        node = create(item);
        node.dataset.key = k;
      }
      if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] || null);
      update(node, item, i);
    });
    for (const node of old.values()) node.remove();
  }
  // table fills a table. Each row is [key, cells]; a cell is a text, or {text, cls, raw, title}.
  function table(id, rows, empty) {
    const body = $(id).tBodies[0], heads = [...$(id).tHead.rows[0].cells];
    if (!rows.length) rows = [["none", [{ text: empty, cls: "empty", span: heads.length }]]];
    list(body, rows, (row) => row[0], () => make("tr"), (tr, row) => {
      list(tr, row[1], (_, i) => i, () => make("td"), (td, cell, i) => {
        const c = typeof cell === "object" ? cell : { text: cell };
        setText(td, c.text);
        setClass(td, `${heads[i].className} ${c.cls || ""}`.trim());
        if (c.span) td.colSpan = c.span;
        if (c.raw !== undefined) td.dataset.raw = String(c.raw);
        if (c.title) td.title = c.title;
      });
    });
  }
  const number = (n, format = count) => ({ text: n < 0 ? "?" : format(n), raw: n });

  // --- Fetching. With a body, get sends it with POST.
  class Refused extends Error {}  // the token is missing or wrong
  class Failed extends Error {}   // the server responds, and has no answer
  async function get(path, body) {
    const headers = body ? { "Content-Type": "application/json" } : {};
    const token = sessionStorage.getItem(tokenKey);
    if (token) headers.Authorization = `Bearer ${token}`;
    const resp = await fetch(path, { headers, cache: "no-store", credentials: "omit",
      method: body ? "POST" : "GET", body: body && JSON.stringify(body),
      signal: AbortSignal.timeout(patienceMs) });
    if (resp.status === 401) throw new Refused();
    const answer = await resp.json();
    if (!resp.ok) throw new Failed(`${answer.error || resp.statusText}${answer.fix ? `; ${answer.fix}` : ""}`);
    return answer;
  }

  // --- Samples of one sidecar, for the charts.
  class History {
    constructor() {
      this.at = [];     // ms
      this.samples = []; // null: a gap
      this.generation = null;
    }
    add(at, st) {
      if (this.generation !== null && this.generation !== st.generation) this.push(at - 1, null);
      this.generation = st.generation;
      this.push(at, st);
    }
    gap(at) {
      if (this.samples.length && this.samples[this.samples.length - 1]) this.push(at, null);
    }
    push(at, st) {
      this.at.push(at);
      this.samples.push(st);
      if (this.at.length > remembered) {
        this.at.shift();
        this.samples.shift();
      }
    }
    // change returns f of a sample less f of the one before it, per second.
    rate(f) {
      return this.samples.map((st, i) => {
        const was = this.samples[i - 1];
        if (!st || !was) return null;
        return Math.max(0, (f(st) - f(was)) * 1000 / (this.at[i] - this.at[i - 1]));
      });
    }
    // ratio returns part/of over the window before each sample.
    ratio(part, of) {
      let first = 0;
      return this.samples.map((st, i) => {
        if (!st) {
          first = i + 1;
          return null;
        }
        while (first < i && this.at[i] - this.at[first] > windowMs) first++;
        const was = this.samples[first];
        const n = of(st) - of(was);
        return n > 0 ? 100 * (part(st) - part(was)) / n : null;
      });
    }
  }

  // --- Charts.
  const charts = {
    tokens: {
      format: (v) => count(Math.round(v)),
      lines: (h) => [
        ["vLLM's own cache", 2, h.rate((s) => s.counters.tokens.own ?? 0)],
        ["asked for", 7, h.rate((s) => s.counters.tokens.asked)],
        ["loaded", 0, h.rate((s) => s.counters.tokens.loaded)],
        ["computed", 1, h.rate((s) => s.counters.tokens.computed)],
      ],
    },
    hits: {
      format: (v) => `${v.toFixed(v > 0 && v < 10 ? 1 : 0)} %`,
      range: [0, 100],
      lines: (h, st) => [
        ["all, by tokens", 7, h.ratio((s) => s.counters.tokens.loaded, (s) => s.counters.tokens.asked)],
        ["arena", 0, h.ratio((s) => s.arena_hits.hit_pages, (s) => s.arena_hits.lookup_pages)],
        ...st.tiers.slice(0, 6).map((t, i) => [t.name, i + 1,
          h.ratio((s) => s.tiers[i]?.hit_pages ?? 0, (s) => s.tiers[i]?.lookup_pages ?? 0)]),
      ],
    },
    bytes: {
      format: (v) => `${bytes(v)}/s`,
      binary: true,
      least: 4096,
      lines: (h, st) => [
        ["loaded by vLLM", 0, h.rate((s) => s.counters.loaded_bytes)],
        ["stored by vLLM", 1, h.rate((s) => s.counters.stored_bytes)],
        ...st.tiers.slice(0, 3).flatMap((t, i) => [
          [`from ${t.name}`, 2 + 2 * i, h.rate((s) => s.tiers[i]?.loaded_bytes ?? 0)],
          [`to ${t.name}`, 3 + 2 * i, h.rate((s) => s.tiers[i]?.stored_bytes ?? 0)]]),
      ],
    },
    lost: {
      format: (v) => (v > 0 && v < 10 ? v.toFixed(1) : count(Math.round(v))),
      lines: (h, st) => Object.keys(st.evictions).sort().map((cause, i) =>
        [causes[cause]?.[0] ?? cause, i, h.rate((s) => s.evictions[cause] ?? 0)]),
    },
  };
  const causes = {
    room: ["for room", "for room: chosen by arena.eviction"],
    cleared: ["cleared", "cleared by an operator, or by vLLM's reset"],
    bad: ["bad", "bad: its bytes were found wrong"],
    duplicate: ["duplicate", "duplicate: other chunks hold the same pages"],
    replaced: ["replaced", "replaced by a longer version"],
  };
  const color = (i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i % colors}`).trim();
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function drawChart(name, history, st) {
    const spec = charts[name], card = document.querySelector(`[data-chart="${name}"]`);
    const lines = spec.lines(history, st), plot = card.querySelector(".plot");
    const names = lines.map((l) => l[0]).join("\n");
    const times = history.at.map((t) => t / 1000);
    const data = [times, ...lines.map((l) => l[2])];
    if (card.plot && card.names !== names) {
      card.plot.destroy();
      card.plot = null;
    }
    if (!card.plot) {
      card.names = names;
      card.plot = new uPlot({
        width: plot.clientWidth, height: plot.clientHeight, legend: { show: false },
        cursor: { drag: { x: false, y: false } }, padding: [8, 28, 0, 0],
        scales: { y: { range: spec.range || ((_, lo, hi) => [0, Math.max(hi * 1.1, spec.least || 4)]) } },
        axes: [
          { stroke: style("--dim"), grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false },
            size: 30, space: 80, values: (_, all) => all.map((v) => clock(v * 1000).slice(0, all[1] - all[0] < 60 ? 8 : 5)) },
          { stroke: style("--dim"), grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false },
            size: spec.binary ? 92 : 62, space: 36,
            incrs: spec.binary ? [...Array(50).keys()].map((i) => 2 ** i) : undefined,
            values: (_, all) => all.map((v) => spec.format(v)) },
        ],
        series: [{}, ...lines.map((l) => ({ label: l[0], stroke: color(l[1]), width: 2,
          points: { show: false } }))],
      }, data, plot);
    } else {
      card.plot.setData(data);
    }
    const said = [];
    list(card.querySelector(".legend"), lines, (l) => l[0], () => {
      const li = make("li");
      li.append(make("span"), document.createTextNode(""), make("b"));
      return li;
    }, (li, [label, i, values]) => {
      const last = values.findLast((v) => v !== null), text = last === undefined ? "–" : spec.format(last);
      setClass(li.firstChild, `swatch c${i % colors}`);
      li.childNodes[1].data = `${label} `;
      setText(li.lastChild, text);
      said.push(`${label} ${text}`);
    });
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `Chart of the last minutes. Now: ${said.join(", ")}`);
  }
  function dropCharts() {
    for (const card of document.querySelectorAll("[data-chart]")) {
      card.plot?.destroy();
      card.plot = null;
    }
  }

  // --- The map.
  const svg = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  function drawMap(map, st) {
    const models = new Map(st.spaces.map((s) => [s.fingerprint, s.fields.model || ""]));
    const sums = map.spaces.map(() => 0);
    let filling = 0, leased = 0, size = 0;
    list($("map"), map.regions, (r) => r.region, () => {
      const node = make("div", "region");
      node.append(make("div", "region-name"), svg("svg"));
      node.lastChild.setAttribute("preserveAspectRatio", "none");
      node.lastChild.setAttribute("role", "img");
      return node;
    }, (node, r) => {
      const pic = node.lastChild, width = Math.ceil(r.size_bytes / r.cells.length), shapes = [];
      let used = 0;
      r.cells.forEach((c, i) => {
        let y = 100;
        const bar = (n, cls) => {
          if (!n) return;
          const h = 100 * n / width, rect = svg("rect");
          y -= h;
          for (const [k, v] of Object.entries({ x: i, y, width: 1.02, height: h, class: cls })) {
            rect.setAttribute(k, v);
          }
          shapes.push(rect);
        };
        c.held.forEach((n, s) => {
          sums[s] += n;
          used += n;
          bar(n, `c${s % colors}`);
        });
        bar(c.filling, "cfilling");
        filling += c.filling;
        used += c.filling;
        leased += c.leased;
      });
      size += r.size_bytes;
      pic.setAttribute("viewBox", `0 0 ${r.cells.length} 100`);
      pic.replaceChildren(...shapes);
      const text = `region ${r.region}, ${r.kind}${r.device ? ` ${r.device}` : ""}: ${bytes(used)} of ${bytes(r.size_bytes)}`;
      pic.setAttribute("aria-label", text);
      setText(node.firstChild, text);
    });
    const held = sums.reduce((a, b) => a + b, 0);
    const items = map.spaces.map((s, i) => [`c${i % colors}`,
      `space ${s.slice(0, 12)}${models.get(s) ? ` (${models.get(s)})` : ""}`, sums[i]]);
    items.push(["cfilling", "being written", filling], ["cfree", "free", size - held - filling]);
    list($("map-legend"), items, (item) => item[1], () => {
      const li = make("li");
      li.append(make("span"), document.createTextNode(""), make("b"));
      return li;
    }, (li, [cls, label, n]) => {
      setClass(li.firstChild, `swatch ${cls}`);
      li.childNodes[1].data = `${label} `;
      setText(li.lastChild, bytes(n));
    });
    put("map-note", map.regions.length
      ? `From each region's beginning, left, to its end. ${bytes(leased)} of what is held are in use by lookups and loads.`
      : "There is no memory yet.");
  }

  // --- One sidecar.
  function drawStatus(st) {
    const n = st.counters, t = n.tokens, last = st.last_minute, saved = n.saved;
    put("which", st.endpoint);
    put("verdict", st.verdict);
    put("ratio", percent(last.tokens.loaded, last.tokens.asked), last.loaded_ratio);
    put("ratio-more", `in the last minute; ${percent(t.loaded, t.asked)} since the start`, st.loaded_ratio);
    put("saved", count(t.loaded), t.loaded);
    put("saved-more", `of ${count(t.asked)} asked for; ${count(last.tokens.loaded)} in the last minute`, t.asked);
    put("ttft", t.loaded > 0 && saved.unpriced_tokens === t.loaded ? "not known" : seconds(saved.ttft_s), saved.ttft_s);
    put("ttft-more", t.requests
      ? `${seconds(saved.ttft_s / t.requests)} a request: ${seconds(saved.compute_s)} of computing, less ${seconds(saved.lookup_s + saved.load_s)}; ${seconds(last.saved.ttft_s)} in the last minute`
      : "no requests so far", last.saved.ttft_s);
    put("arena-used", bytes(st.arena.used_bytes), st.arena.used_bytes);
    put("arena-more", `of ${bytes(st.arena.limit_bytes)}; ${count(st.pages)} pages, ${count(st.leases)} leases`, st.pages);
    put("evicted", count(st.evictions.room), st.evictions.room);
    put("evicted-more", `for room; ${count(n.shed_pages)} pages found no room`, n.shed_pages);
    put("requests", count(t.requests), t.requests);
    put("requests-more", `${count(last.tokens.requests)} in the last minute; ${count(n.lookups)} lookups`, n.lookups);

    const arenaRow = ["arena", ["arena", { text: st.arena.state === "ready" ? "on" : st.arena.state, cls: "good" },
      `${bytes(st.arena.used_bytes)} of ${bytes(st.arena.limit_bytes)}`, number(st.slots.ready),
      number(st.arena_hits.lookup_pages), number(st.arena_hits.hit_pages),
      percent(st.arena_hits.hit_pages, st.arena_hits.lookup_pages),
      number(n.loaded_bytes, bytes), number(n.stored_bytes, bytes), "–", `${count(n.shed_pages)} pages`, "–", "–"]];
    table("tiers", [arenaRow, ...st.tiers.map((x) => [`tier ${x.name}`, [
      { text: x.name === x.kind ? x.name : `${x.name} (${x.kind})`, title: x.detail },
      { text: x.state === "closed" ? "on" : x.state, cls: x.state === "closed" ? "good" : "bad", title: x.error },
      x.used_bytes < 0 ? "?" : bytes(x.used_bytes) + (x.capacity_bytes > 0 ? ` of ${bytes(x.capacity_bytes)}` : ""),
      number(x.chunks), number(x.lookup_pages), number(x.hit_pages), percent(x.hit_pages, x.lookup_pages),
      number(x.loaded_bytes, bytes), number(x.stored_bytes, bytes),
      count(x.load_queue_chunks + x.store_queue_chunks), number(x.shed_chunks),
      number(x.lookup_failures + x.load_failures + x.store_failures),
      x.bytes_per_second > 0 ? `${bytes(x.bytes_per_second)}/s` : "–"]])], "");
    table("evictions", Object.keys(st.evictions).sort((a, b) => st.evictions[b] - st.evictions[a] || (a < b ? -1 : 1))
      .map((c) => [c, [{ text: causes[c]?.[1] ?? c, cls: "wide" }, number(st.evictions[c])]]), "nothing left the arena");
    drawMisses(st);
    drawTenants(st);
    drawSizes(st.demand);
    const frozen = new Set(st.frozen.map((f) => f.session));
    table("sessions", [...st.sessions, ...st.lingering.map((s) => ({ ...s, given: true }))].map((s) => [s.session, [
      s.session, { text: s.role + (s.given ? ", given up" : frozen.has(s.session) ? ", frozen" : ""),
        cls: s.given || frozen.has(s.session) ? "bad" : "" },
      s.engine_id, number(s.rank, String), number(s.pid, String), s.space, new Date(s.since).toLocaleString("en-GB")]]),
    "no engine is connected");
    table("spaces", st.spaces.map((s) => [s.fingerprint, [
      { text: s.fingerprint.slice(0, 12), title: s.fingerprint }, { text: s.fields.model || "", cls: "wide" },
      number(s.pages), number(s.chunks), number(s.page_bytes, bytes), number(s.page_tokens), number(s.sessions)]]),
    "none");
    $("why-space-label").hidden = st.spaces.length < 2;
    list($("why-space"), st.spaces, (s) => s.fingerprint, () => make("option"), (option, s) => {
      option.value = s.fingerprint;
      setText(option, `${s.fingerprint.slice(0, 12)} ${s.fields.model || ""}`);
    });
  }

  // What a miss means comes from the sidecar; what it has no words for is shown by its name.
  let reasons = new Map();
  function drawMisses(st) {
    const misses = Object.entries(st.misses ?? {}).filter(([, m]) => m.ends > 0)
      .sort((a, b) => b[1].pages - a[1].pages || b[1].ends - a[1].ends);
    table("misses", misses.map(([why, m]) => [why, [
      { text: why, cls: "name" }, number(m.ends), number(m.pages),
      { text: why === "end" ? "no miss: the prompt ended" : reasons.get(why)?.means ?? "", cls: "wide" },
      { text: reasons.get(why)?.fix || "nothing", cls: "wide" }]]),
    st.misses ? "no lookup has ended so far" : "this sidecar does not count them");
  }

  function drawTenants(st) {
    $("tenants-card").hidden = !st.tenants.length;
    const share = (x) => (x.share_bytes > 0 ? bytes(x.share_bytes) : "–");
    table("tenants", st.tenants.flatMap((t) => [
      [`${t.name} in arena`, [{ text: t.name || "(none)", cls: "name" }, number(t.asked_tokens), number(t.hit_tokens),
        percent(t.hit_tokens, t.asked_tokens), "arena", number(t.arena.used_bytes, bytes), share(t.arena),
        number(t.arena.evictions), "–", number(t.shed_pages)]],
      ...t.tiers.map((x) => [`${t.name} in tier ${x.name}`, ["", "", "", "", x.name, number(x.used_bytes, bytes),
        share(x), number(x.evictions), number(x.written_bytes, bytes), ""]]),
    ]), "");
  }

  function drawSizes(demand) {
    const points = (n) => `${n > 0 ? "+" : ""}${(100 * n).toFixed(1)} %`;
    put("sizes-note", !demand.watched ? "Nothing is watched: demand.memory is 0."
      : `Simulated from ${demand.sample < 1 ? percent(demand.sample, 1) + " of the" : "all"} chunks asked for in the last ${uptime(demand.since_s)}. The arena had ${percent(demand.measured_hit_ratio, 1)} of these pages.`);
    table("sizes", demand.curve.map((p) => [p.multiple, [
      { text: p.multiple === 1 ? "as it is" : `${p.multiple} ×`, cls: p.multiple === 1 ? "name" : "" },
      number(p.bytes, bytes), { text: percent(p.hit_ratio, 1), raw: p.hit_ratio },
      { text: p.multiple === 1 ? "–" : points(p.gain), raw: p.gain },
      { text: p.full ? "" : "everything fits", cls: "wide" }]]), "nothing was looked up so far");
  }

  // --- Why something missed.
  // whyRequest returns the body for what was entered: page hashes, or a request's name.
  function whyRequest(text) {
    const words = text.split(/[\s,]+/).filter(Boolean);
    const hashes = words.every((w) => /^([0-9a-f]{2})+$/i.test(w)) && (words.length > 1 || words[0].length >= 32);
    const space = $("why-space").value;
    return { timeout_s: patienceMs / 1000, ...(hashes ? { hashes: words, ...(space && { space }) } : { request: text }) };
  }
  // whyLines returns the lines of an answer: [kind, text].
  function whyLines(answer) {
    const lines = [];
    const end = (e) => {
      lines.push(["reason", `${e.reason}: ${e.what}.`]);
      if (e.fix) lines.push(["fix", `To do: ${e.fix}.`]);
    };
    for (const l of answer.lookups) {
      lines.push(["head", `Request ${l.request}, looked up at ${new Date(l.at).toLocaleString("en-GB")} in space ${l.space}`]);
      if (!l.answered) {
        lines.push(["", `Not answered: ${count(l.pages_asked)} pages were asked for; it waits, or was given up.`]);
        continue;
      }
      lines.push(["", `Found ${count(l.pages)} of ${count(l.pages_asked)} pages, ${count(l.pages * l.page_tokens)} tokens, in ${seconds(l.took_s)}${l.sources ? `; from ${l.sources}` : ""}.`]);
      end(l.end);
      if (l.admitted) lines.push(["", `vLLM had ${count(l.own_tokens)} tokens itself, loaded ${count(l.loaded_tokens)} and computed ${count(l.computed_tokens)}.`]);
      if (l.not_taken) lines.push(["", `Not loaded: ${l.not_taken}.`]);
    }
    const p = answer.prefix;
    if (p) {
      const tiers = Object.entries(p.tier_pages).map(([name, n]) => (n < 0 ? `${name} does not answer` : `${name} has ${count(n)}`));
      lines.push(["head", `Held now: ${count(p.pages)} of ${count(p.pages_asked)} pages, ${count(p.pages * p.page_tokens)} tokens`]);
      lines.push(["", [`The arena has ${count(p.arena_pages)} of them`, ...tiers].join("; ") + "."]);
      end(p.end);
    }
    return lines;
  }
  function showWhy(lines) {
    list($("why-answer"), lines, (_, i) => i, () => make("p"), (p, [kind, text]) => {
      setClass(p, kind);
      setText(p, text);
    });
  }
  async function askWhy() {
    const id = chosen(), text = $("why-text").value.trim();
    if (!text) return;
    let lines;
    try {
      lines = whyLines(await get(id === host?.self ? "/v1/why" : `/v1/host/why?id=${id}`, whyRequest(text)));
    } catch (err) {
      lines = [["bad", err instanceof Failed ? `${err.message}.` : err instanceof Refused ? "A token is required."
        : "The sidecar did not respond."]];
    }
    if (id === chosen()) showWhy(lines);
  }

  function drawHost(host) {
    const rows = host.sidecars;
    list($("host").tBodies[0], rows, (s) => s.id, () => {
      const tr = make("tr");
      for (let i = 0; i < 7; i++) tr.append(make("td", i === 1 ? "wide" : i > 1 ? "n" : ""));
      tr.cells[0].append(make("a"));
      return tr;
    }, (tr, s) => {
      const a = tr.cells[0].firstChild, known = !s.error;
      a.setAttribute("href", `#${s.id}`);
      setText(a, s.endpoint + (s.id === host.self ? " (this one)" : ""));
      [null, s.error || s.verdict, known ? `${(100 * s.loaded_ratio).toFixed(1)} %` : "?",
        known ? `${bytes(s.arena.used_bytes)} of ${bytes(s.arena.limit_bytes)}` : "?",
        known ? String(s.engines) : "?", s.pid ? String(s.pid) : "?", known ? uptime(s.uptime_s) : "?"]
        .forEach((text, i) => i && setText(tr.cells[i], text));
      tr.setAttribute("aria-current", String(s.id === chosen()));
    });
  }

  // --- The loop.
  const histories = new Map();
  let host = null, map = null, status = null, shown = "", slowAt = 0, goneSince = 0, wake = () => {};
  let paused = false;
  const chosen = () => location.hash.match(/^#([0-9a-f]{12})$/)?.[1] || shown || host?.self || "";

  function say(state, text, banner) {
    $("state").dataset.state = state;
    setText($("state"), text);
    $("banner").hidden = !banner;
    setText($("banner"), banner || "");
    $("content").classList.toggle("stale", state === "gone");
  }

  async function turn() {
    const now = Date.now();
    if (!host || now - slowAt >= slowEveryMs) {
      host = await get("/v1/host");
      slowAt = now;
      map = null;
      if (!reasons.size) reasons = new Map((await get("/v1/why/reasons")).reasons.map((r) => [r.reason, r]));
    }
    const id = chosen(), self = id === host.self;
    if (id !== shown) {
      shown = id;
      map = null;
      dropCharts();
      showWhy([]);
    }
    const history = histories.get(id) || new History();
    histories.set(id, history);
    drawHost(host);
    $("token").hidden = true;
    $("content").hidden = false;
    try {
      status = await get(self ? "/v1/status" : `/v1/host/status?id=${id}`);
      if (!map) map = await get(self ? "/v1/arena" : `/v1/host/arena?id=${id}`);
    } catch (err) {
      if (!(err instanceof Failed) || self) throw err;
      history.gap(now);
      const of = host.sidecars.find((s) => s.id === id);
      $("detail").hidden = true;
      put("which", of ? of.endpoint : "A sidecar that does not run");
      put("verdict", `Nothing can be shown of it: ${err.message}`);
      host = null; // it may be gone, or be back
      return;
    }
    if (id !== chosen()) return; // another was chosen meanwhile
    $("detail").hidden = false;
    history.add(now, status);
    drawStatus(status);
    drawMap(map, status);
    for (const name of Object.keys(charts)) drawChart(name, history, status);
    document.title = `${status.verdict.split(":")[0]} – Lookaside`;
  }

  async function loop() {
    for (;;) {
      if (!paused && !document.hidden) {
        try {
          await turn();
          goneSince = 0;
          say("live", `live, ${clock(Date.now())}`);
        } catch (err) {
          if (err instanceof Refused) {
            $("token").hidden = false;
            $("content").hidden = true;
            say("paused", "a token is required", sessionStorage.getItem(tokenKey) ? "This token is not the sidecar's." : "");
          } else {
            goneSince ||= Date.now();
            histories.get(shown)?.gap(Date.now());
            host = null;
            document.title = "gone – Lookaside";
            say("gone", "gone", err instanceof Failed ? `The sidecar responds with an error: ${err.message}`
              : `The sidecar has not responded since ${clock(goneSince)}: it ended, or cannot be reached. What is shown is from before. This page tries again every ${statusEveryMs / 1000} s.`);
          }
        }
      }
      if (!goneSince && !paused && chosen() !== shown && $("token").hidden) continue; // just chosen
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, statusEveryMs);
      });
    }
  }

  addEventListener("hashchange", () => wake());
  document.addEventListener("visibilitychange", () => wake());
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    setText($("pause"), paused ? "Go on" : "Pause");
    if (paused) say("paused", "paused");
    wake();
  });
  $("why").addEventListener("submit", (event) => {
    event.preventDefault();
    askWhy();
  });
  $("token").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(tokenKey, $("token-text").value.trim());
    $("token-text").value = "";
    wake();
  });
  function redraw() {
    dropCharts();
    const history = histories.get(shown);
    if (status && history && !$("detail").hidden) {
      for (const name of Object.keys(charts)) drawChart(name, history, status);
    }
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    for (const card of document.querySelectorAll("[data-chart]")) {
      const plot = card.querySelector(".plot"), width = plot.clientWidth;
      if (card.plot && width && card.plot.width !== width) {
        card.plot.setSize({ width, height: plot.clientHeight });
      }
    }
  }).observe($("charts"));
  loop();
})();
