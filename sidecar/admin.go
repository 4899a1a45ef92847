package sidecar

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"path/filepath"
	"strings"
	"time"

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

// admin is the HTTP server that operators and Prometheus talk to. It reads; nothing that it serves changes anything.
type admin struct {
	srv  *http.Server
	done chan struct{} // closed when Serve has returned
	addr string
	file string
}

// startAdmin listens and serves. ready says why the sidecar cannot serve clients, or nil.
func startAdmin(cfg AdminConfig, dir string, log *zap.Logger, reg *prometheus.Registry, status func() Status, ready func() error) (*admin, error) {
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

	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	guard := func(h http.Handler) http.Handler { return requireToken(token, h) }
	mux.Handle("GET /metrics", guard(promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Registry: reg})))
	mux.Handle("GET /v1/status", guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if err := enc.Encode(status()); err != nil {
			log.Debug("status not delivered", zap.Error(err))
		}
	})))
	if cfg.PProf {
		mux.Handle("/debug/pprof/", guard(http.HandlerFunc(pprof.Index)))
		mux.Handle("/debug/pprof/cmdline", guard(http.HandlerFunc(pprof.Cmdline)))
		mux.Handle("/debug/pprof/profile", guard(http.HandlerFunc(pprof.Profile)))
		mux.Handle("/debug/pprof/symbol", guard(http.HandlerFunc(pprof.Symbol)))
		mux.Handle("/debug/pprof/trace", guard(http.HandlerFunc(pprof.Trace)))
	}

	// At a level of its own: http.Server reports only what is wrong.
	errorLog, err := zap.NewStdLogAt(log, zap.WarnLevel)
	if err != nil {
		ln.Close()
		return nil, fmt.Errorf("admin server's log: %w", err)
	}
	a := &admin{
		srv: &http.Server{
			Handler:           mux,
			ReadHeaderTimeout: 5 * time.Second,
			ReadTimeout:       10 * time.Second,
			WriteTimeout:      90 * time.Second, // a CPU profile takes 30 s
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    16 << 10,
			ErrorLog:          errorLog,
		},
		done: make(chan struct{}),
		addr: ln.Addr().String(),
		file: filepath.Join(dir, adminAddrFile),
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

func requireToken(token string, h http.Handler) http.Handler {
	if token == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || subtle.ConstantTimeCompare([]byte(got), []byte(token)) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "admin.token_file is set: a bearer token is required", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// writeFile replaces path as a whole, so that a reader sees the old text or the new one.
func writeFile(path, text string) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// FetchStatus asks the sidecar that owns the endpoint dir for its status. tokenFile may be empty.
func FetchStatus(ctx context.Context, dir, tokenFile string) (Status, error) {
	var st Status
	addr, err := os.ReadFile(filepath.Join(dir, adminAddrFile))
	if errors.Is(err, os.ErrNotExist) {
		return st, fmt.Errorf("no sidecar runs at %s (it has no %s)", dir, adminAddrFile)
	}
	if err != nil {
		return st, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+strings.TrimSpace(string(addr))+"/v1/status", nil)
	if err != nil {
		return st, err
	}
	if tokenFile != "" {
		b, err := os.ReadFile(tokenFile)
		if err != nil {
			return st, fmt.Errorf("admin.token_file: %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(b)))
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return st, fmt.Errorf("no sidecar answers at %s: %w", dir, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return st, fmt.Errorf("%s: %s", req.URL, resp.Status)
	}
	return st, json.NewDecoder(resp.Body).Decode(&st)
}
