// Browsers give no workers to pages opened from files: there the search runs in a frame.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const inner = frame.contentWindow
    inner.document.write(`<body><script src="${url}"></script>`)
    inner.document.close()
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
    const ready = new Promise(resolve => inner.addEventListener("load", resolve))
    this.postMessage = data => ready.then(() => inner.dispatchEvent(new MessageEvent("message", {data})))
  }
}
