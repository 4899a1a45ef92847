package admin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The dashboard of one sidecar shows its neighbours, the other sidecars of this user on this host.
// A page may only read from its own server, so the sidecar reads them for it. Whoever reads must be
// allowed to read the neighbour itself:
//
//   - A request at admin.sock comes from this user or root, who may use the neighbour's admin.sock.
//   - Any other request goes on to the neighbour's admin.listen with the token that it carries. The
//     neighbour checks it.
//   - Without a token only this host may read neighbours, whose admin.listen may be on loopback.
//
// A request cannot name a path: it names one of the sidecars that were found, by its id.

// neighbourTimeout bounds the wait for a neighbour.
const neighbourTimeout = 2 * time.Second

// caller is what is known of the sender of a request.
type caller struct {
	owner         bool   // it came over admin.sock
	authorization string // the header
	near          bool   // it carries the token, or comes from this host
}

// callerKey is the key of the caller in a request's context.
type callerKey struct{}

// callerOf returns what is known of a request that guard lets through.
func callerOf(r *http.Request, owner, token bool) caller {
	c := caller{owner: owner, authorization: r.Header.Get("Authorization"), near: owner || token}
	if at, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && at.Addr().Unmap().IsLoopback() {
		c.near = true
	}
	return c
}

// errFarCaller refuses neighbours to requests from other hosts without a token.
func (c caller) refused() error {
	if c.near {
		return nil
	}
	return apiError(http.StatusForbidden, "set admin.token_file, or ask from this host",
		"other sidecars are shown to this host only, as no token is set")
}

// HostResult is the response of GET /v1/host.
type HostResult struct {
	Self     string      `json:"self" doc:"The id of the sidecar that responds."`
	Sidecars []Neighbour `json:"sidecars" doc:"The sidecars of this user on this host, in the order of their endpoints, with the one that responds."`
}

// A Neighbour is a sidecar of this host as others see it.
type Neighbour struct {
	ID string `json:"id" doc:"Names it in /v1/host/status and /v1/host/arena; the same after a restart."`
	HostSidecar
	State       string  `json:"state" doc:"serving or draining; empty if it could not be asked."`
	Engines     int     `json:"engines" doc:"Engines that are connected."`
	LoadedRatio float64 `json:"loaded_ratio" doc:"Tokens loaded of those asked for, in the last minute."`
}

// neighbourRequest names a sidecar of this host.
type neighbourRequest struct {
	ID string `query:"id" required:"true" minLength:"12" maxLength:"12" doc:"As in /v1/host."`
}

// neighbourID returns the id of a sidecar.
func neighbourID(endpoint string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(endpoint)))[:12]
}

// endpoint returns this sidecar's endpoint in the form in which it is found.
func (o *Operations) endpoint() string {
	dir, err := filepath.Abs(o.Settings.Runtime.Dir)
	if err != nil {
		return o.Settings.Runtime.Dir // it has no form that others would find
	}
	return dir
}

// neighbours returns the directories of this user's sidecars on this host, with this one's, sorted.
func (o *Operations) neighbours() ([]string, error) {
	self := o.endpoint()
	found, err := HostEndpoints(filepath.Dir(self))
	if err != nil {
		return nil, err
	}
	out := []string{self}
	for _, dir := range found {
		if dir != self && !sameFile(dir, self) && ours(dir) {
			out = append(out, dir)
		}
	}
	slices.Sort(out)
	return out, nil
}

// ours reports whether a directory is this user's. Other users' sidecars are not shown, and nothing
// that they made is trusted.
func ours(dir string) bool {
	st, err := os.Lstat(dir)
	if err != nil || !st.IsDir() {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Geteuid()
}

func sameFile(a, b string) bool {
	x, errA := os.Stat(a)
	y, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(x, y)
}

// Host lists the sidecars of this host for the caller in ctx.
func (o *Operations) Host(ctx context.Context) (HostResult, error) {
	who, _ := ctx.Value(callerKey{}).(caller)
	self := o.endpoint()
	out := HostResult{Self: neighbourID(self), Sidecars: []Neighbour{}}
	dirs := []string{self}
	if who.refused() == nil {
		var err error
		if dirs, err = o.neighbours(); err != nil {
			return out, err
		}
	}
	all := make([]*Neighbour, len(dirs))
	var wg sync.WaitGroup
	for i, dir := range dirs {
		wg.Go(func() { all[i] = o.describe(ctx, who, dir, self) })
	}
	wg.Wait()
	for _, n := range all {
		if n != nil {
			out.Sidecars = append(out.Sidecars, *n)
		}
	}
	return out, nil
}

// describe returns the state of the sidecar at dir, or nil if none runs there.
func (o *Operations) describe(ctx context.Context, who caller, dir, self string) *Neighbour {
	n := &Neighbour{ID: neighbourID(dir)}
	n.Endpoint = dir
	var st Status
	if dir == self {
		st = o.Status()
	} else if err := o.read(ctx, who, dir, "/v1/status", &st); err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		n.Error = err.Error()
		return n
	}
	n.HostSidecar.describe(&st)
	n.State, n.LoadedRatio = st.State, st.LastMinute.LoadedRatio
	engines := map[string]bool{}
	for _, s := range st.Sessions {
		engines[s.EngineID] = true
	}
	n.Engines = len(engines)
	return n
}

// readNeighbour reads path of the sidecar that an id names into out.
func (o *Operations) readNeighbour(ctx context.Context, id, path string, out any) error {
	who, _ := ctx.Value(callerKey{}).(caller)
	if err := who.refused(); err != nil {
		return err
	}
	dirs, err := o.neighbours()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(dirs, func(dir string) bool { return neighbourID(dir) == id })
	if at < 0 {
		return apiError(http.StatusNotFound, "GET /v1/host lists those that run",
			"no sidecar of this host has the id %.12q", id)
	}
	if err := o.read(ctx, who, dirs[at], path, out); err != nil {
		var own *APIError
		if errors.As(err, &own) {
			return own
		}
		return apiError(http.StatusBadGateway, "look at that sidecar's log", "%v", err)
	}
	return nil
}

// read reads path of the sidecar at dir into out, with what who may.
func (o *Operations) read(ctx context.Context, who caller, dir, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, neighbourTimeout)
	defer cancel()
	if who.owner {
		return NewClient(dir).Get(ctx, path, out)
	}
	addr, err := os.ReadFile(filepath.Join(dir, addrFile))
	if err != nil {
		return fmt.Errorf("its admin.listen: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return err
	}
	if who.authorization != "" {
		req.Header.Set("Authorization", who.authorization)
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", strings.TrimSpace(string(addr)))
	}
	resp, err := (&http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	}).Do(req)
	if err != nil {
		return fmt.Errorf("it does not respond: %w", err)
	}
	defer resp.Body.Close()
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes))
	switch resp.StatusCode {
	case http.StatusOK:
		return answer.Decode(out)
	case http.StatusUnauthorized:
		return apiError(http.StatusForbidden,
			"give both sidecars the same admin.token_file, or open its own page",
			"it requires another token")
	}
	var e APIError
	_ = answer.Decode(&e) // the status is enough
	return fmt.Errorf("it responds %s", cmp.Or(e.Message, resp.Status))
}
