package admin

import (
	"bytes"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	stdlog "log"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"lookaside/ipc"
	"lookaside/sidecar/settings"
)

// These are the server's files in runtime.dir: one with the host:port of the admin server, and its
// Unix socket. Only the directory's owner and root can connect to the socket, so it requires no
// token.
const (
	addrFile   = "admin.addr"
	socketFile = "admin.sock"
)

// These files in runtime.dir belong to package ipc.
const (
	sessionSocketFile = "session.sock"
	lockFile          = "lock"
)

// answerTimeout bounds how long a client may take to read a response.
const answerTimeout = 15 * time.Second

// MaxOperations bounds the concurrent requests that change something.
const MaxOperations = 4

// A Server serves operators and Prometheus: on a Unix socket in runtime.dir, and on admin.listen
// unless that is none.
type Server struct {
	servers []*http.Server
	wg      sync.WaitGroup // of the servers' goroutines
	addr    string
	file    string
	mux     *router
}

// Start listens and serves the operations and the metrics. dir is the sidecar's runtime.dir.
func Start(o *Operations, m *Metrics, dir string, log *zap.Logger) (_ *Server, err error) {
	cfg := o.Settings.Admin
	token, err := settings.ReadToken("admin.token_file", cfg.TokenFile, log)
	if err != nil {
		return nil, err
	}
	reg := m.registry(o)
	mux := newRouter(o, promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4,
		Registry: reg}), token != "")

	own, err := listenOwner(filepath.Join(dir, socketFile), log)
	if err != nil {
		return nil, err
	}
	hosts, operations := newHostNames(cfg), make(chan struct{}, MaxOperations)
	a := &Server{file: filepath.Join(dir, addrFile), mux: mux}
	tcp, err := a.listen(cfg.Listen)
	if err != nil {
		own.Close()
		return nil, err
	}
	if tcp != nil {
		if ip := tcp.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() {
			log.Warn("the admin server can be reached from other machines; set admin.listen to a loopback address or keep it behind a firewall",
				zap.Stringer("address", tcp.Addr()), zap.Bool("token", token != ""))
		}
		a.serve(tcp, guard(token, false, hosts, operations, mux), log)
	}
	a.serve(own, guard("", true, hosts, operations, mux), log)
	return a, nil
}

// listen listens on admin.listen and writes the address to admin.addr. If the setting is none, it
// returns nil and removes the file that a killed sidecar may have left.
func (a *Server) listen(address string) (net.Listener, error) {
	if address == settings.NoAdminListen {
		if err := os.Remove(a.file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		return nil, nil
	}
	tcp, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("admin.listen: %w", err)
	}
	a.addr = tcp.Addr().String()
	if err := writeFile(a.file, a.addr+"\n"); err != nil {
		tcp.Close()
		return nil, err
	}
	return tcp, nil
}

// Handler returns a handler of the operations, without metrics, for clients that need no token.
func Handler(o *Operations) http.Handler {
	return guard("", false, newHostNames(o.Settings.Admin), make(chan struct{}, MaxOperations),
		newRouter(o, http.NotFoundHandler(), false))
}

// newRouter returns the routes. metrics serves /metrics.
func newRouter(o *Operations, metrics http.Handler, token bool) *router {
	mux := new(router)
	doc := newAPI(mux, o, metrics, token, o.Settings.Admin.PProf)
	mux.ServeMux.HandleFunc("/", noRoute(doc))
	return mux
}

// Addr returns the host:port that the server listens on; "" if admin.listen is none.
func (a *Server) Addr() string { return a.addr }

// Routes returns the patterns of all routes.
func (a *Server) Routes() []string {
	out := slices.Clone(a.mux.patterns)
	for i, p := range out {
		out[i] = strings.Replace(p, rootPattern, "/", 1)
	}
	return out
}

// rootPattern matches the path / and no other.
const rootPattern = "/{$}"

// serve serves one listener until close.
func (a *Server) serve(ln net.Listener, h http.Handler, log *zap.Logger) {
	g := &gate{Listener: ln}
	srv := &http.Server{
		Handler:           g.handler(h),
		ConnContext:       connContext,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		// a CPU profile takes 30 s; other responses have answerTimeout
		WriteTimeout:   90 * time.Second,
		IdleTimeout:    time.Minute,
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       stdlog.New(errorLog{log}, "", 0),
	}
	a.servers = append(a.servers, srv)
	a.wg.Go(func() {
		if err := srv.Serve(g); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the admin server stopped", zap.Stringer("address", ln.Addr()),
				zap.Error(err))
		}
	})
}

// errorLog logs the errors that http.Server reports, as lines of one message.
type errorLog struct{ log *zap.Logger }

// Write implements io.Writer.
func (l errorLog) Write(b []byte) (int, error) {
	l.log.Warn("the admin server", zap.ByteString("reports", bytes.TrimSpace(b)))
	return len(b), nil
}

// Close ends the servers at once and waits for them. It also removes the Unix socket.
func (a *Server) Close() error {
	var errs []error
	for _, srv := range a.servers {
		errs = append(errs, srv.Close())
	}
	a.wg.Wait()
	if a.addr != "" {
		errs = append(errs, os.Remove(a.file))
	}
	return errors.Join(errs...)
}

// ownerListener accepts connections only of this user and of root. The modes of the socket and its
// directory already ensure that; this check holds even if the modes were changed.
type ownerListener struct {
	*net.UnixListener
	log *zap.Logger
}

// listenOwner listens on a Unix socket at path. No socket may exist there.
func listenOwner(path string, log *zap.Logger) (net.Listener, error) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	return &ownerListener{ln, log}, nil
}

// Accept implements net.Listener.
func (l *ownerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := ipc.PeerUID(c)
		if err == nil && (uid == 0 || int(uid) == os.Geteuid()) {
			return c, nil
		}
		l.log.Warn("admin connection refused: another user", zap.Uint32("uid", uid), zap.Error(err))
		c.Close()
	}
}

// controllerKey is the key of the http.ResponseController in a request's context.
type controllerKey struct{}

// guard lets a request through to h under these conditions: it carries the token or addresses the
// server by one of its own names; it was not sent by a page of another site; and if it changes
// something, operations has room for it. Probes need none of these; the dashboard's files, which
// have no data, need no token. owner: only this user and root can connect.
func guard(token string, owner bool, hosts hostNames, operations chan struct{},
	h http.Handler) http.Handler {
	origin := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isProbe(r) {
			h.ServeHTTP(w, r)
			return
		}
		got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		ok = ok && subtle.ConstantTimeCompare([]byte(got), []byte(token)) == 1
		if token != "" && !ok && !isPage(r) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			apiError(http.StatusUnauthorized,
				"send the header Authorization: Bearer TOKEN, or connect to admin.sock in runtime.dir, which needs none", "admin.token_file is set: a bearer token is required").write(w)
			return
		}
		if token == "" && !hosts.has(r.Host) {
			apiError(http.StatusMisdirectedRequest,
				"use an IP address or localhost, add the name to admin.hosts, or set admin.token_file", "the host %.255q is not one of this server's names", r.Host).write(w)
			return
		}
		if err := origin.Check(r); err != nil || !ownOrigin(r) {
			apiError(http.StatusForbidden, "send it from a program, not from another site's page",
				"the request comes from a page of another site").write(w)
			return
		}
		rc := http.NewResponseController(w)
		if !strings.HasPrefix(r.URL.Path, "/debug/pprof/") {
			// only a test's writer has no deadlines
			_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout))
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			select {
			case operations <- struct{}{}:
				defer func() { <-operations }()
			default:
				apiError(http.StatusServiceUnavailable, "try again when one of them has ended",
					"%d operations are under way", MaxOperations).write(w)
				return
			}
		}
		ctx := context.WithValue(r.Context(), controllerKey{}, rc)
		h.ServeHTTP(w, r.WithContext(context.WithValue(ctx, callerKey{},
			callerOf(r, owner, token != ""))))
	})
}

// noRoute responds to requests that match no route.
func noRoute(doc *huma.OpenAPI) http.HandlerFunc {
	paths := slices.Sorted(maps.Keys(doc.Paths))
	return func(w http.ResponseWriter, r *http.Request) {
		if p := doc.Paths[r.URL.Path]; p != nil {
			allowed := http.MethodGet
			if p.Post != nil {
				allowed = http.MethodPost
			}
			w.Header().Set("Allow", allowed)
			apiError(http.StatusMethodNotAllowed, "use "+allowed, "%s is not for %s", r.URL.Path,
				r.Method).write(w)
			return
		}
		apiError(http.StatusNotFound, fmt.Sprintf("the nearest is %s; GET /openapi.json lists all",
			settings.Nearest(r.URL.Path, paths)), "there is no %s", r.URL.Path).write(w)
	}
}

// writeFile replaces path atomically: a reader sees the old text or the new one.
func writeFile(path, text string) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
