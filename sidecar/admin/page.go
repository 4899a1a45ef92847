package admin

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"net/http"
	"path"
	"time"
)

// The dashboard is a page with its script and style, embedded in the binary. It has no data: it
// fetches that from the routes below /v1, with the token if one is required. So the page itself
// requires none, or a browser could not open it. Nothing of it runs in the sidecar, and while
// nobody looks at it, it costs nothing.

// pageFiles has the dashboard's files. Those below uplot are the chart library's, unchanged.
//
//go:embed page
var pageFiles embed.FS

// pageRoutes lists the dashboard's routes and their files.
var pageRoutes = []struct{ path, file, contentType, what string }{
	{"/", "index.html", "text/html; charset=utf-8", "The dashboard, for browsers"},
	{"/assets/dashboard.css", "dashboard.css", "text/css; charset=utf-8", "The dashboard's style"},
	{"/assets/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8",
		"The dashboard's script"},
	{"/assets/icon.svg", "icon.svg", "image/svg+xml", "The dashboard's icon"},
	{"/assets/uplot.css", "uplot/uPlot.min.css", "text/css; charset=utf-8",
		"The style of the dashboard's charts"},
	{"/assets/uplot.js", "uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8",
		"The library of the dashboard's charts: uPlot"},
}

// isPage reports whether a request is for a file of the dashboard.
func isPage(r *http.Request) bool {
	for _, p := range pageRoutes {
		if r.URL.Path == p.path {
			return true
		}
	}
	return false
}

// pagePolicy is the page's Content-Security-Policy: files and data come from this server only, no
// script is inline, no string becomes markup, and no other site shows the page in a frame.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// registerPage adds the routes of the dashboard.
func (a *api) registerPage() {
	for _, p := range pageRoutes {
		content, err := pageFiles.ReadFile("page/" + p.file)
		if err != nil {
			panic(err) // it is embedded
		}
		tag := fmt.Sprintf("%q", fmt.Sprintf("%x", sha256.Sum256(content))[:32])
		pattern, id := "GET "+p.path, "page-"+path.Base(p.file)
		if p.path == "/" {
			pattern = "GET " + rootPattern
		}
		a.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Content-Type", p.contentType)
			h.Set("Content-Security-Policy", pagePolicy)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cross-Origin-Opener-Policy", "same-origin")
			h.Set("Cross-Origin-Resource-Policy", "same-origin")
			h.Set("Cache-Control", "no-cache") // asked for again, and not sent again if unchanged
			h.Set("ETag", tag)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
		})
		contentType, _, _ := bytes.Cut([]byte(p.contentType), []byte(";"))
		o := text(a.get(p.path, id, p.what), string(contentType))
		o.Security = nil
		a.OpenAPI().AddOperation(&o)
	}
}
