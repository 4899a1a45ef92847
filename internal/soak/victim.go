package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// victimSpace is the model of the client that is observed during an attack.
var victimSpace = tiertest.NewSpace("victim", tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: 4,
	PageTokens: 16, DigestBytes: 32})

// victimPatience is how long the victim waits for the reply to a lookup.
const victimPatience = 3 * time.Second

// A victimReport is one line of the victim's output. It prints several a second.
type victimReport struct {
	Lookups    int       `json:"lookups"`
	Pages      int       `json:"pages"`      // requested
	HitPages   int       `json:"hit_pages"`  // loaded and checked
	Late       int       `json:"late"`       // lookups without a reply within victimPatience
	Reconnects int       `json:"reconnects"` // sessions that the victim did not end itself
	LatencyMs  []float64 `json:"latency_ms"` // of each lookup with a reply
	Wrong      string    `json:"wrong"`      // a finding that must never happen
	// SelfWaitMs is the longest time that this machine did not run the victim.
	SelfWaitMs float64 `json:"self_waited"`
}

// victimMain is a well-behaved client with a small working set. Every few milliseconds it looks a
// prefix up, loads the hits, checks each byte and stores the rest. It ends at the end of its
// standard input.
func victimMain(args []string) error {
	p := &peer{memory: client.NewMemory(), out: json.NewEncoder(os.Stdout), space: victimSpace, engine: "victim"}
	fs := pflag.NewFlagSet("victim", pflag.ContinueOnError)
	fs.StringVar(&p.dir, "dir", "", "endpoint")
	if err := fs.Parse(args); err != nil {
		return err
	}
	p.rnd = rand.New(rand.NewPCG(1, 2))
	parent := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, bufio.NewReader(os.Stdin))
		close(parent)
	}()
	v := &victim{peer: p}
	for {
		err := v.session(parent)
		p.disconnect()
		var wrong *wrongError
		if errors.As(err, &wrong) {
			v.report.Wrong = wrong.Error()
			return errors.Join(v.tell(), err)
		}
		select {
		case <-parent:
			return v.tell()
		case <-time.After(50 * time.Millisecond):
		}
		v.report.Reconnects++
	}
}

type victim struct {
	*peer
	report victimReport
	told   time.Time
}

func (v *victim) tell() error {
	err := v.out.Encode(&v.report)
	v.report, v.told = victimReport{LatencyMs: v.report.LatencyMs[:0]}, time.Now()
	return err
}

func (v *victim) session(parent <-chan struct{}) error {
	if err := v.connect(); err != nil {
		return err
	}
	for {
		asked := time.Now()
		select {
		case <-parent:
			return nil
		case <-time.After(5 * time.Millisecond):
		}
		v.report.SelfWaitMs = max(v.report.SelfWaitMs, milliseconds(time.Since(asked))-5)
		prefix := make(tiertest.Prefix, 16)
		prefix[0] = byte(v.rnd.IntN(8))
		if err := v.request(prefix); err != nil {
			return err
		}
		if time.Since(v.told) > 200*time.Millisecond {
			if err := v.tell(); err != nil {
				return err
			}
		}
	}
}

// request looks a prefix up, loads and checks the hits, and stores the rest.
func (v *victim) request(prefix tiertest.Prefix) error {
	v.report.Lookups++
	v.report.Pages += len(prefix)
	start := time.Now()
	hit, err := v.ask(prefix, uint32(victimPatience.Milliseconds()), 0, victimPatience)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		v.report.Late++
		return nil
	case err != nil:
		return err
	case hit > len(prefix):
		return &wrongError{fmt.Sprintf("a hit of %d of %d pages", hit, len(prefix))}
	}
	v.report.LatencyMs = append(v.report.LatencyMs, milliseconds(time.Since(start)))
	if hit > 0 {
		grant, granted, err := v.take(prefix, 0, hit)
		if err != nil {
			return err
		}
		if granted {
			if err := v.verify(prefix, grant.Extents, 0, hit); err != nil {
				return err
			}
			v.report.HitPages += hit
			if err := v.worker.Send(&wire.Release{Load: grant.Load}); err != nil {
				return err
			}
		}
	}
	if hit == len(prefix) {
		return nil
	}
	return v.keep(prefix, hit/v.space.Geometry.PagesPerChunk*v.space.Geometry.PagesPerChunk)
}

// keep stores the pages of a prefix from first on, with the right bytes.
func (v *victim) keep(prefix tiertest.Prefix, first int) error {
	grant, granted, err := v.prepare(prefix, first)
	if !granted || err != nil {
		return err
	}
	size := v.space.Geometry.DigestBytes
	digests := prefix.Digests(0, len(prefix), size)
	for _, e := range grant.Grants {
		for i := range int(e.Pages) {
			page, err := v.page(e, i)
			if err != nil {
				return err
			}
			at := int(e.Page) + i
			tiertest.Fill(page, v.space, digests[at*size:(at+1)*size])
		}
	}
	return v.worker.Send(&wire.CommitStore{Store: grant.Store})
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile returns the q-quantile of values and sorts them; 0 if there are none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[min(len(values)-1, int(q*float64(len(values))))]
}
