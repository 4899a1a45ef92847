package sidecar

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// byEndpoint returns what a sidecar shows of its host.
func byEndpoint(r *adminRig) (self string, all map[string]admin.Neighbour) {
	r.t.Helper()
	var host admin.HostResult
	r.get("/v1/host", &host)
	all = map[string]admin.Neighbour{}
	for _, n := range host.Sidecars {
		all[n.Endpoint] = n
	}
	return host.Self, all
}

// A sidecar reads its neighbours for whoever may read these: by the caller's token, or for this
// user.
func TestNeighbours(t *testing.T) {
	secret := func(text string) func(*settings.Config) {
		file := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return func(c *settings.Config) { c.Admin.TokenFile = file }
	}
	open, _ := startDaemon(t, nil)
	one, _ := startDaemon(t, secret("one"))
	alike, _ := startDaemon(t, secret("one"))
	other, _ := startDaemon(t, secret("other"))
	prefix := storePrefix(t, one, 3)
	dir := func(d *Daemon) string { return d.cfg.Runtime.Dir }
	ids := map[*Daemon]string{}

	r := newAdminRig(t, alike.AdminAddr(), "one")
	self, all := byEndpoint(r)
	for _, d := range []*Daemon{open, one, alike, other} {
		n, there := all[dir(d)]
		if !there {
			t.Fatalf("%s is not there: %+v", dir(d), all)
		}
		ids[d] = n.ID
		if refused := d == other; refused != (n.Error != "") || refused != (n.PID == 0) ||
			refused != (n.State == "") {
			t.Errorf("%+v", n)
		}
		if (self == n.ID) != (d == alike) {
			t.Errorf("self is %s: %+v", self, n)
		}
	}
	if n := all[dir(one)]; n.Arena.UsedBytes == 0 || n.Engines != 1 || n.PID != os.Getpid() {
		t.Errorf("%+v", n)
	}
	var st admin.Status
	if r.get("/v1/host/status?id="+ids[one], &st); st.Endpoint != dir(one) || st.Pages != 3 {
		t.Errorf("%+v", st)
	}
	var fill admin.ArenaMap
	if r.get("/v1/host/arena?id="+ids[one], &fill); len(fill.Spaces) != 1 ||
		len(fill.Regions) == 0 {
		t.Errorf("%+v", fill)
	}
	held := int64(0)
	for _, region := range fill.Regions {
		for _, c := range region.Cells {
			for _, n := range c.Held {
				held += n
			}
		}
	}
	if held != one.Status().Arena.UsedBytes {
		t.Errorf("%d bytes are held, want %d", held, one.Status().Arena.UsedBytes)
	}

	var reason admin.WhyResult
	r.post("/v1/host/why?id="+ids[one], admin.WhyRequest{Hashes: prefix}, &reason)
	if p := reason.Prefix; p == nil || p.Pages != 3 || p.End.Reason != "end" {
		t.Errorf("%+v", reason)
	}
	// What the neighbour refuses is refused as it says.
	ask := "/v1/host/why?id=" + ids[one]
	r.fails(ask, admin.WhyRequest{Request: "unknown"}, http.StatusNotFound, "unknown", "vLLM's log")
	r.fails(ask, map[string]any{}, http.StatusBadRequest, "either the name")
	err := admin.NewClient(dir(alike)).Post(t.Context(), ask, admin.WhyRequest{Request: "unknown"},
		&reason)
	if err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("at the socket: %v", err)
	}

	// Without a token, or with the wrong one, what is secret stays so.
	for _, tc := range []struct {
		at     *Daemon
		token  string
		id     string
		status int
	}{
		{alike, "one", ids[other], http.StatusForbidden},
		{open, "", ids[one], http.StatusForbidden},
		{open, "one", ids[one], http.StatusOK},
		{open, "", ids[open], http.StatusOK},
		{one, "", ids[open], http.StatusUnauthorized},
		{one, "one", "000000000000", http.StatusNotFound},
		{one, "one", "../../etc/pa", http.StatusNotFound},
		{one, "one", "short", http.StatusUnprocessableEntity},
	} {
		r := &adminRig{t: t, addr: tc.at.AdminAddr(), token: tc.token}
		for _, route := range []struct{ method, path, body string }{
			{http.MethodGet, "/v1/host/status", ""},
			{http.MethodGet, "/v1/host/arena", ""},
			{http.MethodPost, "/v1/host/why", `{"hashes": ["` + prefix[0] + `"]}`},
		} {
			kind, want := "", tc.status
			if route.body != "" {
				kind = "application/json"
				if tc.id == ids[open] && want == http.StatusOK {
					want = http.StatusNotFound // as it says itself: it has no space
				}
			}
			resp, body := r.send(route.method, route.path+"?id="+tc.id, kind, []byte(route.body))
			if resp.StatusCode != want ||
				want != http.StatusOK && !strings.Contains(string(body), `"fix"`) {
				t.Errorf("%s %+v: %s: %s", route.path, tc, resp.Status, body)
			}
		}
	}
	// At the socket there is no token: only this user gets there, and may use all the others.
	var host admin.HostResult
	if err := admin.NewClient(dir(open)).Get(t.Context(), "/v1/host", &host); err != nil {
		t.Fatal(err)
	}
	for _, n := range host.Sidecars {
		if ids[other] == n.ID && (n.Error != "" || n.PID == 0) {
			t.Errorf("%+v", n)
		}
	}
}

// A directory of another user is no neighbour.
func TestNeighboursOfOtherUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	d, _ := startDaemon(t, nil)
	stranger, _ := startDaemon(t, nil)
	if err := os.Chown(stranger.cfg.Runtime.Dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, all := byEndpoint(newAdminRig(t, d.AdminAddr(), "")); len(all) == 0 ||
		all[stranger.cfg.Runtime.Dir].ID != "" {
		t.Errorf("%+v", all)
	}
}
