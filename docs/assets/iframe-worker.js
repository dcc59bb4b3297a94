// Pages opened from a disk (file://) may start no worker, and the search is one. There, and only there, a worker is a
// hidden frame: its script runs in the frame's own window, and messages cross as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const answer = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.ready = new Promise((resolve, reject) => {
        inside.document.open()
        inside.document.write("<!doctype html><body></body>")
        inside.document.close()
        inside.postMessage = answer  // what the worker's script calls to speak to us
        inside.importScripts = (...names) => Promise.all(names.map(name => load(new URL(name, address))))
        const load = from => new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.src = from
          script.onload = done
          script.onerror = () => failed(new Error(`${from} cannot be read`))
          inside.document.body.append(script)
        })
        load(new URL(address, location)).then(resolve, reject)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
