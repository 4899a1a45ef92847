package admin

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"lookaside/sidecar/settings"
)

// The chart library is what its makers released: uPlot 1.6.32, dist/uPlot.iife.min.js,
// dist/uPlot.min.css and LICENSE of the npm package.
func TestChartLibraryIsUnchanged(t *testing.T) {
	for name, want := range map[string]string{
		"uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
		"uPlot.min.css":     "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
		"LICENSE":           "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
	} {
		b, err := pageFiles.ReadFile("page/uplot/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(b)); got != want {
			t.Errorf("%s has the SHA-256 %s, want %s", name, got, want)
		}
	}
}

// pageServer serves the routes of a sidecar without parts, with a token.
func pageServer() http.Handler {
	cfg := settings.Defaults()
	o := &Operations{Parts: Parts{Settings: &cfg}}
	return guard("secret", false, newHostNames(cfg.Admin), make(chan struct{}, 1),
		newRouter(o, http.NotFoundHandler(), true))
}

// The page comes without a token, with headers that let nothing but its own files run, and nothing
// of it is inline or from elsewhere.
func TestDashboardFiles(t *testing.T) {
	h := pageServer()
	get := func(path string, header ...string) *http.Response {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Result()
	}
	foreign := regexp.MustCompile(`(?i)(src|href)="[^/#]|//[a-z]|<style|<script>|\son[a-z]+=|\sstyle=`)
	for _, p := range pageRoutes {
		resp := get(p.path)
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK || len(body) == 0 {
			t.Fatalf("%s: %s, %v", p.path, resp.Status, err)
		}
		for name, want := range map[string]string{
			"Content-Type": p.contentType, "Content-Security-Policy": pagePolicy,
			"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
			"Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-cache",
		} {
			if got := resp.Header.Get(name); got != want {
				t.Errorf("%s: %s: %q, want %q", p.path, name, got, want)
			}
		}
		if p.path == "/" {
			if got := foreign.Find(body); got != nil {
				t.Errorf("%s: %q", p.path, got)
			}
		}
		if again := get(p.path, "If-None-Match", resp.Header.Get("ETag")); again.StatusCode !=
			http.StatusNotModified {
			t.Errorf("%s again: %s", p.path, again.Status)
		}
	}
	for _, part := range []string{"'unsafe", "http:", "https:", "*", "data:"} {
		if strings.Contains(pagePolicy, part) {
			t.Errorf("the policy has %s", part)
		}
	}
	for _, path := range []string{"/assets/", "/assets/LICENSE", "/assets/../status", "/index.html",
		"/v1/status", "/v1/host", "/v1/arena"} {
		if resp := get(path); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("%s without the token: %s", path, resp.Status)
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r.Header.Set("Authorization", "Bearer secret")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST /: %d", w.Code)
	}
}

// A name that is not this server's gets no page either: a site that was rebound to this address
// cannot show it.
func TestDashboardNeedsItsName(t *testing.T) {
	cfg := settings.Defaults()
	o := &Operations{Parts: Parts{Settings: &cfg}}
	h := guard("", false, newHostNames(cfg.Admin), make(chan struct{}, 1),
		newRouter(o, http.NotFoundHandler(), false))
	for host, want := range map[string]int{
		"localhost:9": http.StatusOK, "127.0.0.1:9": http.StatusOK,
		"rebound.example": http.StatusMisdirectedRequest,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%s: %d, want %d", host, w.Code, want)
		}
	}
}

// Without a token, other hosts see the sidecar that they ask, and no other.
func TestNeighboursAreForThisHost(t *testing.T) {
	for _, tc := range []struct {
		from         string
		owner, token bool
		want         bool
	}{
		{"127.0.0.1:5", false, false, true}, {"[::1]:5", false, false, true},
		{"[::ffff:127.0.0.1]:5", false, false, true}, {"192.0.2.1:5", false, false, false},
		{"192.0.2.1:5", false, true, true}, {"@", true, false, true}, {"@", false, false, false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/v1/host", nil)
		r.RemoteAddr = tc.from
		if err := callerOf(r, tc.owner, tc.token).refused(); (err == nil) != tc.want {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}
