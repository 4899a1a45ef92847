package sidecar

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
)

// LookupServerOptions say what `lookaside bench lookup-server` serves.
type LookupServerOptions struct {
	Pages         int // indexed
	PrefixPages   int // pages of each prefix
	PagesPerChunk int
	CopyThreads   int // threads that copy at full speed meanwhile; 0: none
}

// lookupServerPageBytes keeps the arena small: nobody reads the pages.
const lookupServerPageBytes = 256

// LookupServerReady is the line that says where to ask, and for what.
type LookupServerReady struct {
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
	Digest        string `json:"digest"` // how the hash of a page is made
	CopyThreads   int    `json:"copy_threads"`
}

// BenchDigest is the hash of a page of a prefix of `lookaside bench lookup-server`: SHA-256 of both
// numbers, each as 8 bytes, little-endian.
func BenchDigest(prefix, page int) [sha256.Size]byte {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(prefix))
	binary.LittleEndian.PutUint64(b[8:], uint64(page))
	return sha256.Sum256(b[:])
}

// ServeLookups runs a sidecar in a directory of its own with pages indexed through its engine,
// writes a LookupServerReady as one
// line to out, and serves until in is at its end or ctx is done.
func ServeLookups(ctx context.Context, o LookupServerOptions, in io.Reader, out io.Writer,
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
	cfg := Defaults()
	cfg.Runtime.Dir = dir
	prefixes := (o.Pages + o.PrefixPages - 1) / o.PrefixPages
	chunks := int64(prefixes) * int64((o.PrefixPages+o.PagesPerChunk-1)/o.PagesPerChunk)
	cfg.Arena.Limit = max(chunks*int64(o.PagesPerChunk)*lookupServerPageBytes, 64<<20)
	cfg.Arena.Initial = cfg.Arena.Limit
	cfg.Lookup.MaxPages = max(cfg.Lookup.MaxPages, o.PrefixPages)
	cfg.Sessions.Share, cfg.Sessions.JointShare = 1, 1
	if cfg, err = cfg.Complete(nil); err != nil {
		return err
	}
	d, err := Start(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
		defer cancel()
		err = errors.Join(err, d.Shutdown(ctx))
	}()

	// The worker that makes the space known; it stays connected, or schedulers would be refused.
	const pageTokens = 16
	hello := wire.Hello{
		Role: wire.RoleWorker, EngineID: "bench", PageTokens: pageTokens,
		PageBytes:     lookupServerPageBytes,
		PagesPerChunk: uint32(o.PagesPerChunk), DigestBytes: sha256.Size,
	}
	worker, err := client.Dial(dir, &hello, rigPatience)
	if err != nil {
		return err
	}
	defer worker.Close()
	for range worker.Welcome.Regions {
		_, files, err := worker.Recv(rigPatience)
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			return err
		}
	}
	if err := fillIndex(ctx, d.engine, engine.Owner(worker.Welcome.Session), prefixes,
		o.PrefixPages); err != nil {
		return err
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

	ready, err := json.Marshal(LookupServerReady{
		Endpoint: dir, Admin: d.AdminAddr(), PID: os.Getpid(), EngineID: hello.EngineID,
		PageTokens: hello.PageTokens, PageBytes: hello.PageBytes,
		PagesPerChunk: hello.PagesPerChunk, DigestBytes: sha256.Size, Prefixes: prefixes,
		PrefixPages: o.PrefixPages,
		Digest:      "sha256(prefix as u64 LE, page as u64 LE)", CopyThreads: o.CopyThreads,
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

// fillIndex stores prefixes without copying anything: what a lookup finds is all that matters here.
func fillIndex(ctx context.Context, e *engine.Engine, owner engine.Owner, prefixes,
	pages int) error {
	hashes := make([]byte, 0, pages*sha256.Size)
	var grants []engine.Grant
	for p := range prefixes {
		if err := ctx.Err(); err != nil {
			return err
		}
		hashes = hashes[:0]
		for i := range pages {
			d := BenchDigest(p, i)
			hashes = append(hashes, d[:]...)
		}
		res, g, err := e.PrepareStore(owner, 0, nil, hashes, grants[:0])
		grants = g
		if err != nil {
			return err
		}
		if res.Shed > 0 || res.Store == 0 {
			return fmt.Errorf("no room for prefix %d: %d pages shed", p, res.Shed)
		}
		if err := e.CommitStore(owner, res.Store, nil); err != nil {
			return err
		}
	}
	return nil
}

// copyForever copies between two regions at full speed, as promotions from a lower tier would,
// until ctx is done.
func copyForever(ctx context.Context, threads int) (err error) {
	const sizeBytes = 256 << 20
	var mem [2][]byte
	for i := range mem {
		r, err := dax.Create(dax.Options{Kind: dax.KindAuto, SizeBytes: sizeBytes,
			NUMANode: dax.NoNUMANode, Populate: true})
		if err != nil {
			return err
		}
		defer r.Close()
		mem[i] = r.Bytes()
	}
	pool := memcopy.NewPool(threads)
	defer pool.Close()
	const job = 32 << 20
	var jobs []memcopy.Job
	for off := 0; off < sizeBytes; off += job {
		jobs = append(jobs, memcopy.Job{Dst: mem[0][off : off+job], Src: mem[1][off : off+job]})
	}
	for ctx.Err() == nil {
		if err := pool.Do(ctx, jobs...); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}
