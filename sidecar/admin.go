package sidecar

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"golang.org/x/net/netutil"
)

// adminAddrFile is the file in runtime.dir that holds the host:port of the admin server.
const adminAddrFile = "admin.addr"

// adminConnections bounds the admin server's connections, so that a client that opens many cannot take the file
// descriptors that sessions need (libzmq aborts the process when accept meets EMFILE).
const adminConnections = 32

// adminOperations bounds the requests that change something and are under way at a time.
const adminOperations = 4

// admin is the HTTP server that operators and Prometheus talk to. What it serves is described in api.go.
type admin struct {
	srv  *http.Server
	done chan struct{} // closed when Serve has returned
	addr string
	file string
	mux  *router
}

// startAdmin listens and serves d.
func startAdmin(d *Daemon, reg *prometheus.Registry, log *zap.Logger) (*admin, error) {
	cfg := d.cfg.Admin
	var token string
	if cfg.TokenFile != "" {
		b, err := os.ReadFile(cfg.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("admin.token_file: %w", err)
		}
		if token = strings.TrimSpace(string(b)); token == "" {
			return nil, fmt.Errorf("admin.token_file: %s is empty", cfg.TokenFile)
		}
		if st, err := os.Stat(cfg.TokenFile); err == nil && st.Mode().Perm()&0o077 != 0 {
			log.Warn("other users may read the admin token", zap.String("file", cfg.TokenFile), zap.String("mode", st.Mode().Perm().String()))
		}
	}
	ln, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("admin.listen: %w", err)
	}
	if ip := ln.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() {
		log.Warn("the admin server can be reached from other machines; set admin.listen to a loopback address or keep it behind a firewall",
			zap.Stringer("address", ln.Addr()), zap.Bool("token", token != ""))
	}

	mux := new(router)
	doc := newAPI(mux, d, promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Registry: reg}), token != "", cfg.PProf)
	mux.ServeMux.HandleFunc("/", noRoute(doc))

	// At a level of its own: http.Server reports only what is wrong.
	errorLog, err := zap.NewStdLogAt(log, zap.WarnLevel)
	if err != nil {
		ln.Close()
		return nil, fmt.Errorf("admin server's log: %w", err)
	}
	a := &admin{
		srv: &http.Server{
			Handler:           guard(token, mux),
			ReadHeaderTimeout: 5 * time.Second,
			ReadTimeout:       10 * time.Second,
			WriteTimeout:      90 * time.Second, // a CPU profile takes 30 s
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    16 << 10,
			ErrorLog:          errorLog,
		},
		done: make(chan struct{}),
		addr: ln.Addr().String(),
		file: filepath.Join(d.listener.Dir(), adminAddrFile),
		mux:  mux,
	}
	if err := writeFile(a.file, a.addr+"\n"); err != nil {
		ln.Close()
		return nil, err
	}
	go func() {
		defer close(a.done)
		if err := a.srv.Serve(netutil.LimitListener(ln, adminConnections)); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the admin server stopped", zap.Error(err))
		}
	}()
	return a, nil
}

// close ends the server at once and waits for it.
func (a *admin) close() error {
	err := a.srv.Close()
	<-a.done
	return errors.Join(err, os.Remove(a.file))
}

// controllerKey is where a request's context has its http.ResponseController.
type controllerKey struct{}

// guard lets through who carries the token, what no page of another site made a browser send, and a few changes at a time.
func guard(token string, h http.Handler) http.Handler {
	origin := http.NewCrossOriginProtection()
	operations := make(chan struct{}, adminOperations)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" || r.URL.Path == "/readyz" {
			h.ServeHTTP(w, r)
			return
		}
		got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if token != "" && (!ok || subtle.ConstantTimeCompare([]byte(got), []byte(token)) != 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			apiError(http.StatusUnauthorized, "send the header Authorization: Bearer TOKEN; commands take it from --admin-token-file", "admin.token_file is set: a bearer token is required").write(w)
			return
		}
		if err := origin.Check(r); err != nil {
			apiError(http.StatusForbidden, "send it from a program, not from another site's page", "%v", err).write(w)
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			select {
			case operations <- struct{}{}:
				defer func() { <-operations }()
			default:
				apiError(http.StatusServiceUnavailable, "try again when one of them has ended", "%d operations are under way", adminOperations).write(w)
				return
			}
		}
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), controllerKey{}, http.NewResponseController(w))))
	})
}

// noRoute answers what no route takes.
func noRoute(doc *huma.OpenAPI) http.HandlerFunc {
	paths := slices.Sorted(maps.Keys(doc.Paths))
	return func(w http.ResponseWriter, r *http.Request) {
		if p := doc.Paths[r.URL.Path]; p != nil {
			allowed := http.MethodGet
			if p.Post != nil {
				allowed = http.MethodPost
			}
			w.Header().Set("Allow", allowed)
			apiError(http.StatusMethodNotAllowed, "use "+allowed, "%s is not for %s", r.URL.Path, r.Method).write(w)
			return
		}
		apiError(http.StatusNotFound, fmt.Sprintf("the nearest is %s; GET /openapi.json lists all", nearest(r.URL.Path, paths)), "there is no %s", r.URL.Path).write(w)
	}
}

// write answers a request with the error, at once: without waiting for its body.
func (e *APIError) write(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.status)
	_ = json.NewEncoder(w).Encode(e) // who asked may have left
}

// writeFile replaces path as a whole, so that a reader sees the old text or the new one.
func writeFile(path, text string) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
