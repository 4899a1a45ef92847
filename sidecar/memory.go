package sidecar

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	rtmetrics "runtime/metrics"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/ipc"
	"lookaside/ipc/hosts"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
)

// These bound the memory that the sidecar takes beside the arena. The start checks them together
// with arena.limit, and Go's heap is kept within them: if a control group exceeds its limit, the
// kernel kills a process in it.
const (
	// ownBytes is for a sidecar with few sessions: Go's runtime and heap, libzmq, and garbage that
	// is not collected yet.
	ownBytes = 24 << 20
	// sessionBytes is for one session: its receive buffer, its ZeroMQ sockets, and data in the
	// kernel that its client has not read.
	sessionBytes = wire.MaxPacketBytes + 64<<10 + 320<<10
	// outsideGo is the part of ownBytes that Go's limit does not count: libzmq, kernel memory, and
	// the program itself.
	outsideGo = 16 << 20
	// indexShare is the arena's size divided by the largest size of its index. The index is not in
	// Go's heap.
	indexShare = 32
	// leastGo is the least limit of Go's heap. Below it, collecting garbage would take all
	// processors.
	leastGo = 32 << 20
	// hintBytes bounds the memory for what other sidecars hold. A page takes 21 to 43 bytes, so
	// there is room for some 12 million pages of 16 tokens: more than the arenas of one host hold.
	// The table begins small and grows with what is held, so a lower limit saves nothing.
	hintBytes = 512 << 20
	// leastHints is the least limit of hints.
	leastHints = 1 << 20
	// lookupBytes bounds the unfinished and unread messages of the lookups' connections. A burst of
	// the longest lookups stays far below it. Above it all these connections are cut off, because
	// libzmq does not report which one holds the messages.
	lookupBytes = 192 << 20
	// leastLookups is the least limit of lookupBytes.
	leastLookups = 24 << 20
	// leastReserve stays free when the arena grows.
	leastReserve = 16 << 20
)

// shares are limits of what parts of the sidecar may take, in bytes.
type shares struct {
	lookups int64 // the lookups' connections
	hints   int64 // what other sidecars hold
}

// ownMemory returns how much memory the sidecar may take beside the arena and its index.
func ownMemory(c *settings.Config) int64 {
	own := int64(ownBytes) + int64(c.Sessions.Limit)*sessionBytes + c.Demand.Memory
	if c.Events.Endpoint != "" {
		own += ipc.EventBytes
	}
	if c.Hosts.Enabled() {
		own += int64(c.Hosts.Connections) * hosts.Bytes
	}
	return max(own, dax.BudgetReserve)
}

// reserve returns how much of ownMemory the sidecar has not taken yet, at least leastReserve.
func reserve(c *settings.Config) int64 {
	var size, resident, shared int64
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		_, _ = fmt.Sscan(string(b), &size, &resident, &shared)
	}
	return max(ownMemory(c)-(resident-shared)*int64(os.Getpagesize()), leastReserve)
}

// shareMemory keeps the sidecar within the limits of its control groups, if any. It limits Go's
// heap, unless GOMEMLIMIT does, and returns the limits of other parts. arenaBytes is the memory
// that the arena has not taken yet.
func shareMemory(c *settings.Config, arenaBytes int64, log *zap.Logger) (shares, error) {
	s := shares{lookups: lookupBytes, hints: hintBytes}
	free, limited, err := dax.GroupMemory()
	if err != nil || !limited {
		return s, err
	}
	free -= arenaBytes + arenaBytes/indexShare
	s.lookups = min(lookupBytes, max(free/4, leastLookups))
	free -= s.lookups
	if c.Peers.Enabled {
		// While their table grows, hints take half as much again.
		if most := max((free-ownMemory(c))/3, leastHints); s.hints > most {
			s.hints = most
			log.Info("the memory for what other sidecars hold is limited to what the control group has room for",
				zap.String("to", bytesize.Format(most)))
		}
		free -= s.hints * 3 / 2
	}
	if os.Getenv("GOMEMLIMIT") != "" {
		return s, nil
	}
	limit := max(goMemory()+free-outsideGo, leastGo)
	debug.SetMemoryLimit(limit)
	log.Info("Go's heap is limited to what the control group has room for",
		zap.String("to", bytesize.Format(limit)))
	return s, nil
}

// goMemory returns Go's memory as its limit counts it.
func goMemory() int64 {
	s := []rtmetrics.Sample{{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}}
	rtmetrics.Read(s)
	return int64(s[0].Value.Uint64() - s[1].Value.Uint64())
}

// checkMemory refuses an arena that takes so many bytes more if that would not leave the sidecar
// its own memory.
func checkMemory(c *settings.Config, kind dax.Kind, bytes int64) error {
	own := ownMemory(c)
	err := dax.CheckBudget(bytes, kind, own)
	if err == nil {
		return nil
	}
	if errors.Is(err, dax.ErrNoMemory) && kind != dax.KindHugetlb {
		return fmt.Errorf("arena.limit %s of kind %s, beside %s for the sidecar itself (sessions.limit %d): %w; lower arena.limit or sessions.limit, or raise the limit",
			bytesize.Format(c.Arena.Limit), kind, bytesize.Format(own), c.Sessions.Limit, err)
	}
	return fmt.Errorf("arena.limit %s of kind %s: %w", bytesize.Format(c.Arena.Limit), kind, err)
}

// garbageBytes is how much garbage may gather before a collection, once what is in use is more than
// an eighth of it.
const garbageBytes = 40 << 20

// paceCollector keeps the garbage within garbageBytes while the heap in use grows (demand.memory),
// until ctx is done. It does nothing if GOGC is set.
func paceCollector(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	every := time.NewTicker(10 * time.Second)
	defer every.Stop()
	live := []rtmetrics.Sample{{Name: "/gc/heap/live:bytes"}}
	for percent := gcPercent; ; {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
		rtmetrics.Read(live)
		want := int(min(gcPercent, max(50, garbageBytes*100/max(live[0].Value.Uint64(), 1))))
		if want*4 < percent*3 || percent*4 < want*3 { // a change stops all goroutines for a moment
			percent = want
			debug.SetGCPercent(percent)
		}
	}
}
