// The player: a slider over the moments of texts. Texts only ever become text nodes.
"use strict";
var jpegDlmPlayer = (() => {
  const BINS = 5, PAUSE_MS = 130, EXTENT = 2.5; // standardized latents rarely lie beyond
  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const words = text => text.split(/\s+/).filter(Boolean);

  // For each text, for each place: the index of the moment since which its word has stayed.
  function settled(moments) {
    const last = moments[moments.length - 1];
    return last.texts.map((text, i) => words(text).map((word, place) => {
      let since = moments.length - 1;
      while (since > 0 && words(moments[since - 1].texts[i] || "")[place] === word) since--;
      return since;
    }));
  }

  function heat(canvas, grid) {
    canvas.height = grid.length;
    canvas.width = grid[0].length;
    canvas.style.height = `${Math.max(24, Math.min(96, 10 * grid.length))}px`;
    const style = getComputedStyle(canvas), pen = canvas.getContext("2d");
    const colors = [style.getPropertyValue("--cold"), style.getPropertyValue("--warm")];
    grid.forEach((row, y) => row.forEach((value, x) => {
      pen.globalAlpha = Math.min(1, Math.abs(value) / EXTENT);
      pen.fillStyle = colors[value < 0 ? 0 : 1];
      pen.fillRect(x, y, 1, 1);
    }));
  }

  function mount(root, moments) {
    let at = moments.length - 1, since = [], timer = null, live = false;
    const bar = make("div", "player-bar"), play = make("button", "player-play", "\u25b6"), told = make("output");
    const slider = make("input"), noise = make("span", "player-noise"), level = make("span");
    const list = root.querySelector("ol") || make("ol", "samples"), legend = make("p", "player-legend");
    play.type = "button";
    slider.type = "range";
    slider.min = "0";
    slider.setAttribute("aria-label", "Step");
    noise.append(level);
    bar.append(play, slider, told, noise);
    legend.append("settled: ", ...["first", "early", "midway", "late", "last"].map((name, i) => make("b", `s${i}`, name)),
      make("b", "open", "still changing"));
    root.replaceChildren(bar, list, legend);

    function showText(item, text, i, moment) {
      item.replaceChildren();
      words(text).forEach((word, place) => {
        const stays = since[i] && since[i][place], done = stays !== undefined && stays <= at;
        const step = done ? moments[stays].step : null;
        const bin = done ? Math.min(BINS - 1, Math.floor(BINS * step / Math.max(1, moment.steps))) : 0;
        const span = make("span", done ? `w s${bin}` : "w open", word);
        if (done) span.title = `settled at step ${step}`;
        item.append(place ? " " : "", span);
      });
      if (moment.latents && moment.latents[i]) {
        const canvas = make("canvas");
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", `${moment.latents[i].length} latents at step ${moment.step}`);
        item.append(canvas);
        heat(canvas, moment.latents[i]);
      }
    }

    function show(index) {
      at = Math.max(0, Math.min(index, moments.length - 1));
      const moment = moments[at];
      if (!moment) return;
      slider.max = String(moments.length - 1);
      slider.value = String(at);
      const left = moment.t === undefined ? null : Math.max(0, 1 - moment.t);
      const said = `step ${moment.step.toLocaleString("en")} of ${moment.steps.toLocaleString("en")}`;
      told.textContent = left === null ? said : `${said}, noise ${left.toFixed(2)}`;
      slider.setAttribute("aria-valuetext", told.textContent);
      noise.hidden = left === null;
      level.style.width = `${100 * (left || 0)}%`;
      while (list.children.length > moment.texts.length) list.lastChild.remove();
      moment.texts.forEach((text, i) => {
        if (!list.children[i]) {
          const item = make("li");
          item.dir = "auto";
          list.append(item);
        }
        showText(list.children[i], text, i, moment);
      });
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "\u25b6";
      play.setAttribute("aria-label", "Play");
    }

    play.addEventListener("click", () => {
      if (timer) return stop();
      if (at >= moments.length - 1) show(0);
      play.textContent = "\u23f8";
      play.setAttribute("aria-label", "Pause");
      timer = setInterval(() => (at < moments.length - 1 ? show(at + 1) : stop()), PAUSE_MS);
    });
    slider.addEventListener("input", () => {
      stop();
      live = false;
      show(Number(slider.value));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(at));
    stop();
    if (moments.length) {
      since = settled(moments);
      show(at);
    }
    return {
      add(moment) { // as a run goes on, the newest moment is shown unless someone moved the slider
        if (!moments.length) live = true;
        moments.push(moment);
        since = settled(moments);
        show(live ? moments.length - 1 : at);
      },
    };
  }

  for (const root of document.querySelectorAll("[data-moments]")) mount(root, JSON.parse(root.dataset.moments));
  return { mount };
})();
