// The page docs/scaling_laws.md: one budget, one size, and what the law says of them. The constants are those of
// jaxscale/tools/planning (scaling_data.js is written from them), and the tests hold the functions below against planning's.
(() => {
  const data = window.scalingData
  const SVG = "http://www.w3.org/2000/svg"
  const WIDTH = 640, HEIGHT = 300, LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 36

  // N parameters, D tokens, C training FLOPs, loss in nats per token.
  const trainFlops = (N, D) => 6 * N * D
  const optimalParams = C => Math.sqrt(C / 6 / data.tokens_per_param)
  const optimalTokens = N => data.tokens_per_param * N
  const inParams = (law, N) => law.A ? law.A * N ** -law.alpha : 0
  const inTokens = (law, D) => law.B ? law.B * D ** -law.beta : 0
  const loss = (law, N, D) => law.E + inParams(law, N) + inTokens(law, D)
  const tokensForLoss = (law, N, wanted) => {
    const left = wanted - law.E - inParams(law, N)
    return left > 0 && law.B ? (law.B / left) ** (1 / law.beta) : null
  }
  const chipHours = (C, peak, mfu) => C / (peak * mfu * data.goodput) / 3600
  // Where a law in both is lowest for C operations: the derivative of loss(N, C / 6 / N) is 0.
  const lowestParams = (law, C) => law.A && law.B
    ? (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta)) * (C / 6) ** (law.beta / (law.alpha + law.beta))
    : null
  window.scalingLaws = { trainFlops, optimalParams, optimalTokens, loss, tokensForLoss, chipHours, lowestParams }

  const short = value => {
    if (value === null || !Number.isFinite(value)) return "n/a"
    const units = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]
    const [size, unit] = units.find(([size]) => value >= size) || [1, ""]
    return value >= 1e18 ? value.toExponential(2) : (value / size).toPrecision(3) + unit
  }
  const dollars = value => value === null ? "no price known" : "$" + short(value)
  const numberOf = text => ({ k: 1e3, m: 1e6, b: 1e9, t: 1e12 }[text.slice(-1).toLowerCase()] || 1) * parseFloat(text)

  const begin = root => {
    const part = name => root.querySelector(`[data-part="${name}"]`)
    const field = name => root.querySelector(`[name="${name}"]`)
    const laws = { ...data.laws }
    for (const [place, chip] of data.chips.entries()) field("chip").add(new Option(chip.name, place))
    field("chip").value = data.chips.findIndex(chip => chip.name === "H100 SXM")
    const chip = () => data.chips[field("chip").value]
    const takeChip = () => {
      field("price").value = chip().price === null ? "" : chip().price
      field("mfu").value = Math.round(50 * (chip().mfu[0] + chip().mfu[1]))
    }
    takeChip()

    const state = () => ({
      C: 10 ** field("flops").value,
      N: 10 ** field("params").value,
      law: laws[field("law").value],
      mfu: field("mfu").value / 100,
      price: field("price").value === "" ? null : +field("price").value,
      served: 10 ** field("served").value,
    })

    const show = () => {
      const { C, N, law, mfu, price, served } = state()
      const D = C / trainFlops(N, 1), best = optimalParams(C), lowest = lowestParams(law, C)
      const hours = chipHours(C, chip().peak_flops, mfu), cost = price === null ? null : hours * price
      const wanted = loss(law, N, D), half = tokensForLoss(law, N / 2, wanted)
      part("flops").value = C.toExponential(2)
      part("params").value = short(N)
      part("mfu").value = field("mfu").value + "%"
      part("served").value = short(served)
      const small = N < data.smallest_fitted && field("law").value in data.laws
      const rows = [
        ["tokens", `${short(D)}, ${(D / N).toPrecision(3)} per parameter`],
        ["predicted loss", wanted.toFixed(4) + " nats per token" + (small ? " (below the smallest model of the fit)" : "")],
        ["loss term of the size", inParams(law, N).toFixed(4)],
        ["loss term of the tokens", inTokens(law, D).toFixed(4)],
        [`${data.tokens_per_param} tokens per parameter`, `${short(best)} on ${short(optimalTokens(best))}, loss ${loss(law, best, optimalTokens(best)).toFixed(4)}`],
        ["lowest predicted loss", lowest === null ? "n/a: the law has one term" : `${short(lowest)} on ${short(C / 6 / lowest)}, loss ${loss(law, lowest, C / 6 / lowest).toFixed(4)}`],
        ["chip-hours", `${short(hours)} of ${chip().name}, ${dollars(cost)}`],
        ["half the size, same loss", half === null ? "not reachable at this size" : `${short(half)} tokens, ${(trainFlops(N / 2, half) / C).toPrecision(3)} times the FLOPs`],
        ["training and serving", half === null ? short(C + 2 * N * served) + " FLOPs"
          : `${short(C + 2 * N * served)} FLOPs; at half the size ${short(trainFlops(N / 2, half) + N * served)}`],
      ]
      part("facts").replaceChildren(...rows.flatMap(([name, text]) => {
        const dt = document.createElement("dt"), dd = document.createElement("dd")
        dt.textContent = name
        dd.textContent = text
        return [dt, dd]
      }))
      draw(part("plot"), { C, N, law, best, lowest })
    }

    const move = (name, steps) => {
      field(name).value = +field(name).value + steps * field(name).step
      show()
    }
    root.querySelector("form").addEventListener("input", event => {
      if (event.target.name === "chip") takeChip()
      if (event.target.name !== "forecast") show()
    })
    root.querySelector("form").addEventListener("submit", event => event.preventDefault())
    field("forecast").addEventListener("change", async event => {
      const [file] = event.target.files
      if (!file) return
      try {
        const { law } = JSON.parse(await file.text())
        for (const name of ["E", "A", "B", "alpha", "beta"]) if (typeof law[name] !== "number") throw new Error(name)
        laws.own = law
        if (!field("law").querySelector('[value="own"]')) field("law").add(new Option("your scaling ladder", "own"))
        field("law").value = "own"
        part("told").textContent = `${file.name}: law fitted in ${law.form === "both" ? "size and tokens" : law.form}`
        show()
      } catch (error) {
        part("told").textContent = `${file.name} is not a forecast.json of jaxscale plan --loss --to=WORKDIR`
      }
    })
    part("plot").addEventListener("keydown", event => {
      const found = { ArrowLeft: ["params", -1], ArrowRight: ["params", 1], ArrowUp: ["flops", 1], ArrowDown: ["flops", -1] }[event.key]
      if (!found) return
      event.preventDefault()
      move(...found)
    })
    const point = event => {
      const box = part("plot").getBoundingClientRect()
      const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)
      const [low, high] = span(state().C)
      field("params").value = low + Math.min(1, Math.max(0, share)) * (high - low)
      show()
    }
    part("plot").addEventListener("pointerdown", event => {
      part("plot").setPointerCapture(event.pointerId)
      point(event)
    })
    part("plot").addEventListener("pointermove", event => event.buttons && point(event))
    const asked = new URLSearchParams(location.hash.slice(1))
    for (const name of ["flops", "params"]) if (asked.has(name)) field(name).value = Math.log10(numberOf(asked.get(name)))
    show()
  }

  const span = C => [Math.log10(optimalParams(C)) - 1.6, Math.log10(optimalParams(C)) + 1.2]

  const draw = (svg, { C, N, law, best, lowest }) => {
    const [low, high] = span(C), parts = []
    const curve = [...Array(161).keys()].map(i => 10 ** (low + (high - low) * i / 160)).map(N => [N, loss(law, N, C / 6 / N)])
    const least = Math.min(...curve.map(([, y]) => y)), most = Math.min(Math.max(...curve.map(([, y]) => y)), least * 1.35)
    const bottom = least - (most - least) * 0.08
    const x = N => LEFT + (Math.log10(N) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
    const y = value => TOP + (most - value) / (most - bottom) * (HEIGHT - TOP - BOTTOM)
    const add = (name, attributes, text) => {
      const node = document.createElementNS(SVG, name)
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value)
      if (text) node.textContent = text
      parts.push(node)
    }
    for (let power = Math.ceil(low * 2) / 2; power <= high; power += 0.5) {
      const at = x(10 ** power)
      add("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM })
      add("text", { x: at, y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, short(10 ** power))
    }
    for (let i = 0; i <= 4; i++) {
      const value = bottom + (most - bottom) * i / 4
      add("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) })
      add("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(3))
    }
    add("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "parameters; tokens = C / 6 / parameters")
    add("line", { class: "dashed", x1: x(best), x2: x(best), y1: TOP, y2: HEIGHT - BOTTOM })
    const seen = curve.filter(([, value]) => value <= most)
    add("path", { class: "line", d: "M" + seen.map(([N, value]) => `${x(N).toFixed(1)},${y(value).toFixed(1)}`).join("L") })
    if (lowest !== null && Math.log10(lowest) > low && Math.log10(lowest) < high) {
      add("circle", { class: "mark", cx: x(lowest), cy: y(loss(law, lowest, C / 6 / lowest)), r: 4 })
    }
    const here = Math.min(Math.max(x(N), LEFT), WIDTH - RIGHT), value = loss(law, N, C / 6 / N)
    add("line", { class: "cross", x1: here, x2: here, y1: TOP, y2: HEIGHT - BOTTOM })
    add("circle", { class: "other", cx: here, cy: Math.max(TOP, y(value)), r: 6 })
    svg.setAttribute("aria-label", `Loss over size at ${C.toExponential(2)} FLOPs: ${short(N)} parameters reach ${value.toFixed(3)}, the lowest is ${least.toFixed(3)}`)
    svg.replaceChildren(...parts)
  }

  for (const root of document.querySelectorAll(".scaling")) begin(root)
})()
