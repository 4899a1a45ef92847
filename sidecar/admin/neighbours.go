package admin

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
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
	ID string `json:"id" doc:"Names it in the routes below /v1/host; the same after a restart."`
	HostSidecar
	State       string  `json:"state" doc:"serving or draining; empty if it could not be asked."`
	Engines     int     `json:"engines" doc:"Engines that are connected."`
	LoadedRatio float64 `json:"loaded_ratio" doc:"Tokens loaded of those asked for, in the last minute."`
}

// neighbourRequest names a sidecar of this host.
type neighbourRequest struct {
	ID string `query:"id" required:"true" minLength:"12" maxLength:"12" doc:"As in /v1/host."`
}

// neighbourWhy asks a sidecar of this host why something missed.
type neighbourWhy struct {
	ID   string `query:"id" required:"true" minLength:"12" maxLength:"12" doc:"As in /v1/host."`
	Body WhyRequest
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
	} else if err := o.ask(ctx, who, dir, "/v1/status", nil, &st); err != nil {
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

// askNeighbour requests path of the sidecar that an id names, and reads the response into out. With
// in the request is a POST whose body is in.
func (o *Operations) askNeighbour(ctx context.Context, id, path string, in, out any) error {
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
	if err := o.ask(ctx, who, dirs[at], path, in, out); err != nil {
		var own *APIError
		if errors.As(err, &own) {
			return own
		}
		return apiError(http.StatusBadGateway, "look at that sidecar's log", "%v", err)
	}
	return nil
}

// noPort returns why the sidecar at dir has no admin.addr: it serves its owner only, or none runs
// there.
func noPort(ctx context.Context, dir string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, socketFile))
	if err != nil {
		return err
	}
	conn.Close()
	return apiError(http.StatusForbidden, "run lookaside top as its user, or give it an admin.listen",
		"it has no port (admin.listen is none)")
}

// ask requests path of the sidecar at dir, with what who may, and reads the response into out. With
// in the request is a POST whose body is in.
func (o *Operations) ask(ctx context.Context, who caller, dir, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, neighbourTimeout)
	defer cancel()
	client, err := who.client(ctx, dir)
	if err != nil {
		return err
	}
	if in != nil {
		err = client.Post(ctx, path, in, out)
	} else {
		err = client.Get(ctx, path, out)
	}
	var e *APIError
	if errors.As(err, &e) && e.status == http.StatusUnauthorized {
		return apiError(http.StatusForbidden,
			"give both sidecars the same admin.token_file, or open its own page",
			"it requires another token")
	}
	return err
}

// client returns a client of the sidecar at dir, with what the caller may.
func (c caller) client(ctx context.Context, dir string) (*Client, error) {
	if c.owner {
		return NewClient(dir), nil
	}
	addr, err := os.ReadFile(filepath.Join(dir, addrFile))
	if errors.Is(err, fs.ErrNotExist) {
		err = noPort(ctx, dir)
	}
	if err != nil {
		return nil, fmt.Errorf("its admin.listen: %w", err)
	}
	return newClient(dir, ownURL, strings.TrimPrefix(c.authorization, "Bearer "),
		func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", strings.TrimSpace(string(addr)))
		}), nil
}
