package sidecar

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// An adminRig asks a running sidecar over HTTP, and checks every answer against the sidecar's own
// /openapi.json.
type adminRig struct {
	t       *testing.T
	addr    string
	token   string
	doc     map[string]any
	schemas *jsonschema.Compiler
}

func newAdminRig(t *testing.T, addr, token string) *adminRig {
	t.Helper()
	r := &adminRig{t: t, addr: addr, token: token, schemas: jsonschema.NewCompiler()}
	resp, body := r.send(http.MethodGet, "/openapi.json", "", nil)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("/openapi.json: %s: %s", resp.Status, body)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.doc = doc.(map[string]any)
	r.schemas.DefaultDraft(jsonschema.Draft2020) // which OpenAPI 3.1 builds on
	r.schemas.AssertFormat()
	if err := r.schemas.AddResource("file:///openapi.json", doc); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *adminRig) send(method, path, contentType string, body []byte) (*http.Response, []byte) {
	r.t.Helper()
	req, err := http.NewRequest(method, "http://"+r.addr+path, bytes.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if r.token != "" {
		req.Header.Set("Authorization", "Bearer "+r.token)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, b
}

// at walks down the document; nil if there is no such thing.
func (r *adminRig) at(keys ...string) any {
	var v any = r.doc
	for _, k := range keys {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[k]
	}
	return v
}

// conforms checks an answer against what the document says of it.
func (r *adminRig) conforms(method, path string, resp *http.Response, body []byte) {
	r.t.Helper()
	path, _, _ = strings.Cut(path, "?")
	status := fmt.Sprint(resp.StatusCode)
	where := []string{"paths", path, strings.ToLower(method), "responses", status}
	if r.at(where...) == nil {
		where[4] = "default"
	}
	contentType, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	content, ok := r.at(append(where, "content")...).(map[string]any)
	if !ok {
		r.t.Errorf("%s %s: %s is not documented", method, path, resp.Status)
		return
	}
	if content[contentType] == nil {
		r.t.Errorf("%s %s: %s with %s is not documented: %v", method, path, resp.Status,
			contentType, content)
		return
	}
	if contentType != "application/json" || path == "/openapi.json" {
		return
	}
	pointer := ""
	for _, k := range append(where, "content", contentType, "schema") {
		pointer += "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(k)
	}
	schema, err := r.schemas.Compile("file:///openapi.json#" + pointer)
	if err != nil {
		r.t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		r.t.Errorf("%s %s: %v: %s", method, path, err, body)
		return
	}
	if err := schema.Validate(v); err != nil {
		r.t.Errorf("%s %s: %v:\n%s", method, path, err, body)
	}
}

// get fetches a path into out.
func (r *adminRig) get(path string, out any) {
	r.t.Helper()
	resp, body := r.send(http.MethodGet, path, "", nil)
	r.conforms(http.MethodGet, path, resp, body)
	if err := json.Unmarshal(body, out); err != nil || resp.StatusCode != http.StatusOK {
		r.t.Fatalf("%s: %s, %v: %s", path, resp.Status, err, body)
	}
}

// post sends in, and wants it to succeed with out.
func (r *adminRig) post(path string, in, out any) {
	r.t.Helper()
	if code, body := r.try(path, in); code != http.StatusOK {
		r.t.Fatalf("%s: %d: %s", path, code, body)
	} else if err := json.Unmarshal(body, out); err != nil {
		r.t.Fatal(err)
	}
}

func (r *adminRig) try(path string, in any) (int, []byte) {
	r.t.Helper()
	b, ok := in.([]byte)
	if !ok {
		var err error
		if b, err = json.Marshal(in); err != nil {
			r.t.Fatal(err)
		}
	}
	resp, body := r.send(http.MethodPost, path, "application/json", b)
	r.conforms(http.MethodPost, path, resp, body)
	return resp.StatusCode, body
}

// fails sends in, and wants an error of that status whose text and fix have all of want.
func (r *adminRig) fails(path string, in any, status int, want ...string) {
	r.t.Helper()
	code, body := r.try(path, in)
	var e admin.APIError
	if err := json.Unmarshal(body, &e); err != nil || code != status || e.Message == "" ||
		e.Fix == "" {
		r.t.Errorf("%s: %d %s, want %d with error and fix", path, code, body, status)
	}
	for _, w := range want {
		if !strings.Contains(e.Message+" "+e.Fix, w) {
			r.t.Errorf("%s: %q, %q does not say %s", path, e.Message, e.Fix, w)
		}
	}
}

// storePrefix stores a prefix of pages, each a chunk, and returns its hashes in hexadecimal.
func storePrefix(t *testing.T, d *Daemon, pages int) (words []string) {
	t.Helper()
	w := dialWorker(t, d, 4096)
	packed := distinct(pages)
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: packed}); err != nil {
		t.Fatal(err)
	}
	for {
		typ, b, _ := next(t, w)
		if typ != wire.TypeStoreGrant {
			continue
		}
		var g wire.StoreGrant
		if err := g.Decode(b, &wire.DefaultLimits); err != nil {
			t.Fatal(err)
		}
		if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			t.Fatal(err)
		}
		break
	}
	for i := range pages {
		words = append(words, fmt.Sprintf("%x", packed[32*i:32*i+32]))
	}
	for end := time.Now().Add(patience); d.Status().Pages < pages; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d pages after the commit", d.Status().Pages)
		}
	}
	return words
}

func TestOpenAPIDocumentIsUpToDate(t *testing.T) {
	const path = "../docs/openapi.json"
	want, err := admin.OpenAPI(Version)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is out of date: go test ./sidecar -run OpenAPI -update (%v)", path, err)
	}
}

// Every route is documented, and everything that is documented is there.
func TestRoutesAndDocumentAgree(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, _ := startDaemon(t, func(c *settings.Config) {
		c.Admin.PProf, c.Admin.TokenFile = true,
			file
	})
	r := newAdminRig(t, d.AdminAddr(), "secret")
	if v := r.at("openapi"); v != "3.1.0" {
		t.Errorf("OpenAPI %v", v)
	}
	var documented []string
	for path, item := range r.at("paths").(map[string]any) {
		for method := range item.(map[string]any) {
			documented = append(documented, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(documented)
	routed := slices.Sorted(slices.Values(d.admin.Routes()))
	if !slices.Equal(routed, documented) {
		t.Errorf("routes\n%s\ndocumented\n%s", strings.Join(routed, "\n"), strings.Join(documented,
			"\n"))
	}
	for _, route := range documented {
		method, path, _ := strings.Cut(route, " ")
		if path == "/debug/pprof/profile" || path == "/debug/pprof/trace" || path == "/v1/record" {
			continue // they take their time
		}
		body, contentType := []byte("{}"), "application/json"
		if method == http.MethodGet {
			body, contentType = nil, ""
		}
		resp, answer := r.send(method, path, contentType, body)
		if resp.StatusCode == http.StatusNotFound ||
			resp.StatusCode == http.StatusMethodNotAllowed {
			t.Errorf("%s: %s", route, resp.Status)
		}
		if !strings.HasPrefix(path, "/debug/") {
			r.conforms(method, path, resp, answer)
		}
		// Only health is for everybody, and the dashboard's files, which have no data.
		plain := &adminRig{t: t, addr: r.addr}
		resp, answer = plain.send(method, path, contentType, body)
		open := path == "/healthz" || path == "/readyz" || path == "/" ||
			strings.HasPrefix(path, "/assets/")
		if open != (resp.StatusCode != http.StatusUnauthorized) {
			t.Errorf("%s without the token: %s", route, resp.Status)
		} else if !open && !bytes.Contains(answer, []byte(`"fix"`)) {
			t.Errorf("%s without the token: %s", route, answer)
		}
	}
}

func TestRequestsThatAreWrong(t *testing.T) {
	d, _ := startDaemon(t, nil)
	r := newAdminRig(t, d.AdminAddr(), "")
	words := storePrefix(t, d, 3)
	r.fails("/v1/pin", []byte("{"), 400)
	r.fails("/v1/pin", []byte(`{"hashs": ["00"]}`), 422, "hashs", `nearest name is "hashes"`)
	r.fails("/v1/pin", map[string]any{"hashes": []string{}}, 422, "hashes")
	r.fails("/v1/pin", map[string]any{"hashes": words, "timeout_s": 1e9}, 422, "timeout_s")
	r.fails("/v1/pin", map[string]any{"hashes": []string{"zz"}}, 400, "hash 1", "hexadecimal")
	r.fails("/v1/pin", map[string]any{"hashes": []string{"00ff"}}, 400, "2 bytes",
		"64 hexadecimal digits")
	r.fails("/v1/pin", map[string]any{"hashes": words, "space": "ffffffffffff"}, 404, "open are",
		d.engine.Spaces()[0].Fingerprint.Short())
	r.fails("/v1/pin", map[string]any{"hashes": []string{strings.Repeat("0", 64)}}, 404, "prefetch")
	r.fails("/v1/pin", map[string]any{"hashes": slices.Repeat(words, 1+d.cfg.Lookup.MaxPages/3)},
		413, "lookup.max_pages")
	// little beyond, or it would be cut off before it reads the answer
	r.fails("/v1/pin", map[string]any{"hashes": words, "label": strings.Repeat("x",
		int(admin.MaxBodyBytes(d.cfg.Lookup.MaxPages)))}, 413)
	r.fails("/v1/unpin", map[string]any{}, 400, "all")
	r.fails("/v1/unpin", map[string]any{"pin": "00", "all": true}, 400, "all")
	r.fails("/v1/unpin", map[string]any{"pin": "00"}, 404, `"00"`, "/v1/pins")
	r.fails("/v1/clear", map[string]any{}, 400, "all")
	r.fails("/v1/clear", map[string]any{"space": "00", "all": true}, 400, "all")
	r.fails("/v1/clear", map[string]any{"all": true, "tier": "disc"}, 404, `"disc"`)

	for _, tc := range []struct {
		method, path, contentType string
		status                    int
		want                      string
	}{
		// which a browser sends from any page
		{http.MethodPost, "/v1/clear", "text/plain", 415, "application/json"},
		{http.MethodGet, "/v1/clear", "", 405, "use POST"},
		{http.MethodPost, "/v1/status", "application/json", 405, "use GET"},
		{http.MethodGet, "/v1/tier", "", 404, "nearest is /v1/tiers"},
	} {
		resp, body := r.send(tc.method, tc.path, tc.contentType, []byte(`{"all": true}`))
		if resp.StatusCode != tc.status || !strings.Contains(string(body), tc.want) ||
			!strings.Contains(string(body), `"fix"`) {
			t.Errorf("%s %s: %s: %s", tc.method, tc.path, resp.Status, body)
		}
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+d.AdminAddr()+"/v1/clear",
		strings.NewReader(`{"all": true}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Origin", "http://elsewhere.example")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("from another site's page: %s", resp.Status)
	}
	if got := d.Status().Pages; got != 3 {
		t.Errorf("%d pages are left of 3", got)
	}
}

func TestPins(t *testing.T) {
	d, _ := startDaemon(t, nil)
	r := newAdminRig(t, d.AdminAddr(), "")
	words := storePrefix(t, d, 8)
	space := d.engine.Spaces()[0].Fingerprint.String()
	var list admin.PinsResult
	if r.get("/v1/pins", &list); len(list.Pins) != 0 {
		t.Errorf("%+v", list)
	}
	var one, two admin.PinStatus
	r.post("/v1/pin", admin.PinRequest{PrefixRequest: admin.PrefixRequest{Space: space[:5],
		Hashes: words[:4]},
		Label: "system prompt"}, &one)
	r.post("/v1/pin", map[string]any{"hashes": append(slices.Clone(words),
		strings.Repeat("0", 64))}, &two)
	if one.Pages != 4 || one.PagesAsked != 4 || one.Space != space ||
		one.Label != "system prompt" || two.Pages != 8 || two.PagesAsked != 9 {
		t.Errorf("%+v, %+v", one, two)
	}
	if r.get("/v1/pins", &list); len(list.Pins) != 2 || list.Pins[0].Pin != one.Pin ||
		list.Pins[1].Pin != two.Pin {
		t.Errorf("%+v", list)
	}
	if n := d.Status().Slots.Leased; n != 8 {
		t.Errorf("%d slots are leased", n)
	}
	var un admin.UnpinResult
	if r.post("/v1/unpin", admin.UnpinRequest{Pin: two.Pin}, &un); un.Unpinned != 1 ||
		d.Status().Slots.Leased != 4 {
		t.Errorf("%+v, %d leased", un, d.Status().Slots.Leased)
	}
	r.fails("/v1/unpin", admin.UnpinRequest{Pin: two.Pin}, 404, two.Pin)
	// Of a prefix all is forgotten, or what lies behind its beginning.
	var cleared admin.ClearResult
	r.fails("/v1/clear", map[string]any{"all": true, "hashes": words}, 400, "one prefix")
	r.fails("/v1/clear", map[string]any{"hashes": words, "first_page": 8}, 400, "8 hashes")
	r.fails("/v1/clear", map[string]any{"space": space[:7], "first_page": 1}, 400,
		"no hashes are given")
	r.post("/v1/clear", map[string]any{"hashes": words, "first_page": 6}, &cleared)
	if len(cleared.Cleared) == 0 || cleared.Cleared[0].Chunks != 2 || cleared.Pins != 0 ||
		d.Status().Pages != 6 {
		t.Errorf("%+v, %d pages", cleared, d.Status().Pages)
	}
	// Clearing a space ends the pins of what it clears, or nothing would be freed.
	cleared = admin.ClearResult{}
	r.post("/v1/clear", map[string]any{"space": space[:7], "tier": "arena"}, &cleared)
	if len(cleared.Cleared) != 1 || cleared.Cleared[0].Tier != "arena" ||
		cleared.Cleared[0].Chunks != 6 || cleared.Pins != 1 || !cleared.Complete {
		t.Errorf("%+v", cleared)
	}
	if st := d.Status(); st.Pages != 0 || st.Slots.Ready != 0 || st.Leases != 0 {
		t.Errorf("%+v", st)
	}
	if r.get("/v1/pins", &list); len(list.Pins) != 0 {
		t.Errorf("%+v", list)
	}
	if r.post("/v1/unpin", admin.UnpinRequest{All: true}, &un); un.Unpinned != 0 {
		t.Errorf("%+v", un)
	}
}

// More at a time than are allowed are told so, and nobody waits.
func TestOperationsAreBounded(t *testing.T) {
	d, _ := startDaemon(t, nil)
	r := newAdminRig(t, d.AdminAddr(), "")
	answers := make(chan string)
	for range admin.MaxOperations + 1 {
		conn, err := net.Dial("tcp", d.AdminAddr())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		// Its body never comes.
		if _, err := io.WriteString(conn,
			"POST /v1/unpin HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		go func() {
			b := make([]byte, 4096)
			if n, err := conn.Read(b); err == nil {
				answers <- string(b[:n])
			}
		}()
	}
	select {
	case a := <-answers:
		if !strings.Contains(a, " 503 ") || !strings.Contains(a, "under way") ||
			!strings.Contains(a, `"fix"`) {
			t.Errorf("%s", a)
		}
	case <-time.After(patience):
		t.Fatal("no limit")
	}
	var st admin.Status
	r.get("/v1/status", &st) // others go on
}
