// Search from a folder: a browser starts no worker for a page without a server, so the worker's script runs in a frame
// that answers to the worker's interface, and that the script finds as `IFrameWorker`.
"use strict";
if (location.protocol === "file:") {
  const load = (page, url) => new Promise((resolve, reject) => {
    const script = page.createElement("script");
    Object.assign(script, { src: url, onload: resolve, onerror: () => reject(new Error(`no script ${url}`)) });
    page.body.append(script);
  });
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame); // about:blank: it shares this page's origin, and is there at once
      this.inner = frame.contentWindow;
      const page = this.inner.document;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = (...urls) => urls.reduce((last, next) => last.then(() => load(page, next)), Promise.resolve());
      this.ready = load(page, new URL(url, document.baseURI).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.inner.frameElement.remove(); }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
