// Package lookupserver serves a sidecar that holds many pages, so that a client in another process
// can measure lookups.
package lookupserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/bench/copypool"
	"lookaside/internal/prefixes"
	"lookaside/sidecar"
	"lookaside/sidecar/settings"
)

// Options selects what to serve.
type Options struct {
	Pages         int // held
	PrefixPages   int // pages of each prefix
	PagesPerChunk int
	CopyThreads   int // threads that copy at full speed during the lookups; 0: none
}

// pageBytes keeps the arena small: the pages are never read.
const pageBytes = 256

// Ready is the line that tells a client which endpoint and prefixes to use.
type Ready struct {
	Endpoint      string `json:"endpoint"`
	Admin         string `json:"admin"`
	PID           int    `json:"pid"`
	EngineID      string `json:"engine_id"`
	Rank          int    `json:"rank"`
	PageTokens    uint32 `json:"page_tokens"`
	PageBytes     uint64 `json:"page_bytes"`
	PagesPerChunk uint32 `json:"pages_per_chunk"`
	DigestBytes   int    `json:"digest_bytes"`
	Prefixes      int    `json:"prefixes"`
	PrefixPages   int    `json:"pages_per_prefix"`
	Digest        string `json:"digest"` // how the hash of a page is computed
	CopyThreads   int    `json:"copy_threads"`
}

// Serve runs a sidecar in a directory of its own and stores prefixes in it. It then writes a Ready
// as one line to out, and serves until in ends or ctx is done.
func Serve(ctx context.Context, o Options, in io.Reader, out io.Writer,
	log *zap.Logger) (err error) {
	if o.Pages < 1 || o.PrefixPages < 1 || o.PagesPerChunk < 1 || o.CopyThreads < 0 {
		return errors.New("pages, prefix-pages and pages-per-chunk must be positive")
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		stop()
	}()

	dir, err := os.MkdirTemp("", "lookaside-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	count := (o.Pages + o.PrefixPages - 1) / o.PrefixPages
	cfg, err := config(dir, o, count)
	if err != nil {
		return err
	}
	d, err := sidecar.Start(ctx, cfg, log, sidecar.Origin{})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), prefixes.Patience)
		defer cancel()
		err = errors.Join(err, d.Shutdown(ctx))
	}()

	// It stays connected, because schedulers of a space without a worker are refused.
	worker, err := prefixes.DialWorker(dir, prefixes.Shape{PageBytes: pageBytes,
		PagesPerChunk: o.PagesPerChunk})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, worker.Close()) }()
	for n := range count {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := worker.Store(prefixes.Digests(n, o.PrefixPages), nil); err != nil {
			return fmt.Errorf("prefix %d: %w", n, err)
		}
	}
	copied := make(chan error, 1)
	if o.CopyThreads > 0 {
		copying, stopCopying := context.WithCancel(ctx)
		go func() { copied <- copyForever(copying, o.CopyThreads) }()
		defer func() {
			stopCopying()
			err = errors.Join(err, <-copied)
		}()
	}

	ready, err := json.Marshal(Ready{
		Endpoint: dir, Admin: d.AdminAddr(), PID: os.Getpid(), EngineID: prefixes.EngineID,
		PageTokens: prefixes.PageTokens, PageBytes: pageBytes,
		PagesPerChunk: uint32(o.PagesPerChunk), DigestBytes: prefixes.DigestBytes,
		Prefixes: count, PrefixPages: o.PrefixPages,
		Digest: "sha256(prefix as u64 LE, page as u64 LE)", CopyThreads: o.CopyThreads,
	})
	if err != nil {
		return err
	}
	if _, err := out.Write(append(ready, '\n')); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// config returns the configuration of a sidecar whose arena has exactly enough room for count
// prefixes from the start.
func config(dir string, o Options, count int) (settings.Config, error) {
	cfg := settings.Defaults()
	cfg.Runtime.Dir = dir
	chunks := int64(count) * int64((o.PrefixPages+o.PagesPerChunk-1)/o.PagesPerChunk)
	cfg.Arena.Limit = max(chunks*int64(o.PagesPerChunk)*pageBytes, 64<<20)
	cfg.Arena.Initial = cfg.Arena.Limit
	cfg.Lookup.MaxPages = max(cfg.Lookup.MaxPages, o.PrefixPages)
	cfg.Sessions.Share, cfg.Sessions.JointShare = 1, 1
	return cfg.Complete(nil)
}

// copyForever copies between two regions at full speed, as promotions from a lower tier would,
// until ctx is done.
func copyForever(ctx context.Context, threads int) (err error) {
	const sizeBytes = 256 << 20
	var mem [2][]byte
	for i := range mem {
		r, err := dax.Create(ctx, dax.Options{Kind: dax.KindAuto, SizeBytes: sizeBytes,
			NUMANode: dax.NoNUMANode, Populate: true})
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		defer r.Close()
		mem[i] = r.Bytes()
	}
	pool := copypool.New(threads)
	defer pool.Close()
	const job = 32 << 20
	var jobs []copypool.Job
	for off := 0; off < sizeBytes; off += job {
		jobs = append(jobs, copypool.Job{Dst: mem[0][off : off+job], Src: mem[1][off : off+job]})
	}
	for ctx.Err() == nil {
		if err := pool.Do(ctx, jobs...); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}
