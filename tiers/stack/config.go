package stack

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
)

// Mode selects which hits in tiers are promoted.
type Mode uint8

const (
	// PromoteAuto promotes chunks that are estimated to arrive before they could be recomputed.
	PromoteAuto   Mode = iota
	PromoteAlways      // promotes all hits
	PromoteNever       // promotes none: lookups use the arena only
)

var modeNames = [...]string{"auto", "always", "never"}

func (m Mode) String() string { return modeNames[m] }

// ParseMode returns the mode of a name.
func ParseMode(name string) (Mode, error) {
	for i, n := range modeNames {
		if n == name {
			return Mode(i), nil
		}
	}
	return 0, fmt.Errorf("%w: %q is not auto, always or never", tiers.ErrInvalid, name)
}

// Op is a kind of call to a tier.
type Op uint8

const (
	OpLookup Op = iota
	OpLoad
	OpStore
)

// Config configures a Stack. Engine and Arena are required, and so is Bell if there are tiers or
// peers. Other zero fields take the stated default.
type Config struct {
	// Engine must be made with the tiers of [Admissions] and with [Bell.Ring] as its Wake.
	Engine *engine.Engine
	Bell   *Bell
	// Arena returns the memory of a region, in its whole length.
	Arena func(region uint32) []byte
	// Log gets a line when a breaker opens or closes, and when a chunk has rotted. Default:
	// nothing.
	Log *zap.Logger
	// Promote selects which hits in tiers are promoted. Default PromoteAuto.
	Promote Mode
	// LookupDeadline bounds how long a lookup waits, even if its caller allows more. Default 3 s.
	LookupDeadline time.Duration
	// MaxPending bounds the lookups under way, and MaxPendingBytes the digests that they hold. A
	// lookup beyond either limit returns only what the arena holds. Defaults 1,024 and 64 MiB.
	MaxPending      int
	MaxPendingBytes int64
	// LongChunks is how many chunks of a lookup are walked on the caller's goroutine. The walker
	// walks the rest, lookups by turns. Default 512, which takes some 100 µs.
	LongChunks int
	// BounceBytes is the size of a buffer for chunks that go from one tier to another. It holds at
	// least one chunk. Each such tier has one buffer, and so has each Move. Default 64 MiB.
	BounceBytes int64
	// Verify, if given, checks the bytes of restored chunks in their order. It reports each to the
	// engine (engine.Engine.EndVerify) before it returns. Several goroutines may call it, but not
	// for the same chunk at the same time. It must not call the Stack. ctx ends with the Stack.
	// Default: no chunk needs it.
	Verify func(ctx context.Context, chunks []engine.Verification)
	// PatrolBytes bounds the bytes of the arena that are read in a second to find chunks that have
	// changed since their commit. 0: none are read, and chunks are not checked before they are
	// written to a tier.
	PatrolBytes int64
	// PatrolEvery is the least time from the start of one walk over the arena to that of the next.
	// Default 10 min.
	PatrolEvery time.Duration
	// Recheck compares a chunk with the checksums that it was committed with. known reports whether
	// there are any; it may make them then. An error that wraps tiers.ErrCorrupt means that the
	// chunk has changed; any other error means that it cannot be read. The chunk has no lease. It
	// must be given with PatrolBytes.
	Recheck func(v *engine.Verification) (known bool, err error)
	// Peers, if given, leases chunks of other sidecars. Lookups try it before all tiers. The engine
	// must have ForeignSlots, and Bell.Ring as its Wake. Its CopyAfter sets which chunks are copied
	// into the arena. Default: there are no peers.
	Peers Peers
	// Linger is how long an unused chunk leased from a peer is kept. Default 2 s.
	Linger time.Duration
	// BorrowTimeout bounds one call of Peers.Borrow. Default 1 s.
	BorrowTimeout time.Duration
	// Forget, if given, makes sure that chunks dropped from the arena are not restored. Clear, Drop
	// and Move call it before they return, and return its error as the arena's. Default: nothing is
	// restored.
	Forget func() error
	// Restored, if given, waits until all that another run has left is in the arena. Clear and Drop
	// call it first, because what they drop must not come after them. Default: the arena is as it
	// is when the Stack is made.
	Restored func(ctx context.Context) error
	// Tenants, if given, counts what is written to tiers for each tenant.
	Tenants *tenant.Registry
	// Observe, if given, is called for each chunk loaded or stored without error, with its bytes,
	// and for each lookup of a tier. took is the time since the call of the tier began. Any
	// goroutine may call it, and it must not block.
	Observe func(tier int, op Op, bytes int64, took time.Duration)
	// Tiers are the tiers, nearest first. The Stack does not close them.
	Tiers []TierConfig
}

// TierConfig configures one tier.
type TierConfig struct {
	Name  string // unique, not "arena"
	Tier  tiers.Tier
	Admit engine.Admission // which chunks are written to it
	// Queue is how many chunks may wait to be written to it. Default as in engine.TierAdmission.
	Queue int

	LookupWorkers int           // concurrent lookups, unless it is Local. Default 4
	LoadWorkers   int           // concurrent calls of Load. Default 2
	StoreWorkers  int           // concurrent calls of Store. Default 2
	Batch         int           // the most chunks of one call. Default 16
	LookupTimeout time.Duration // Default 500 ms
	LoadTimeout   time.Duration // of one call. Default 2 s
	StoreTimeout  time.Duration // of one call. Default 30 s
	// Failures is how many calls in a row fail before the breaker opens. Default 3.
	Failures int
}

// arenaName is the arena's name in lists of tiers.
const arenaName = "arena"

func orDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// validate sets the defaults and checks the limits.
func (c *Config) validate() error {
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	orDefault(&c.LookupDeadline, 3*time.Second)
	orDefault(&c.MaxPending, 1024)
	orDefault(&c.MaxPendingBytes, 64<<20)
	orDefault(&c.LongChunks, 512)
	orDefault(&c.BounceBytes, 64<<20)
	orDefault(&c.Linger, 2*time.Second)
	orDefault(&c.BorrowTimeout, time.Second)
	orDefault(&c.PatrolEvery, 10*time.Minute)
	if c.Engine == nil || c.Arena == nil || c.Bell == nil && (len(c.Tiers) > 0 || c.Peers != nil) {
		return fmt.Errorf("%w: a stack needs an engine, an arena and a bell", tiers.ErrInvalid)
	}
	if c.Promote > PromoteNever || min(c.MaxPending, c.LongChunks) < 0 ||
		min(c.MaxPendingBytes, c.BounceBytes, c.PatrolBytes) < 0 ||
		min(c.LookupDeadline, c.Linger, c.BorrowTimeout, c.PatrolEvery) < 0 {
		return fmt.Errorf("%w: a limit of the stack is negative", tiers.ErrInvalid)
	}
	if c.PatrolBytes > 0 && c.Recheck == nil {
		return fmt.Errorf("%w: a patrol without Recheck", tiers.ErrInvalid)
	}
	if len(c.Tiers) > engine.MaxTiers {
		return fmt.Errorf("%w: %d tiers, at most %d", tiers.ErrInvalid, len(c.Tiers),
			engine.MaxTiers)
	}
	return c.validateTiers()
}

// validateTiers sets the defaults of all tiers and checks their limits and names.
func (c *Config) validateTiers() error {
	names := map[string]bool{"": true, arenaName: true}
	for i := range c.Tiers {
		t := &c.Tiers[i]
		if names[t.Name] || t.Tier == nil {
			return fmt.Errorf("%w: tier %d has the name %q, which is another's, or no tier",
				tiers.ErrInvalid, i, t.Name)
		}
		names[t.Name] = true
		if err := t.validate(); err != nil {
			return err
		}
	}
	return nil
}

// validate sets the defaults of one tier and checks its limits.
func (t *TierConfig) validate() error {
	orDefault(&t.LookupWorkers, 4)
	orDefault(&t.LoadWorkers, 2)
	orDefault(&t.StoreWorkers, 2)
	orDefault(&t.Batch, 16)
	orDefault(&t.LookupTimeout, 500*time.Millisecond)
	orDefault(&t.LoadTimeout, 2*time.Second)
	orDefault(&t.StoreTimeout, 30*time.Second)
	orDefault(&t.Failures, 3)
	if min(t.LookupWorkers, t.LoadWorkers, t.StoreWorkers, t.Batch, t.Failures) < 1 ||
		min(t.LookupTimeout, t.LoadTimeout, t.StoreTimeout) < 0 {
		return fmt.Errorf("%w: tier %s has a limit below 1", tiers.ErrInvalid, t.Name)
	}
	return nil
}

// Admissions returns the tiers' configuration for an engine. A tier that admits evicted chunks
// takes them from the tier above if that reports its victims; the engine then writes nothing to it.
func Admissions(list []TierConfig) []engine.TierAdmission {
	out := make([]engine.TierAdmission, len(list))
	for i, t := range list {
		out[i] = engine.TierAdmission{Admit: t.Admit, Queue: t.Queue,
			RoomBytes: max(t.Tier.Stats().CapacityBytes, 0)}
		if victims(list, i) != nil {
			out[i].Admit = engine.AdmitNever
		}
	}
	return out
}

// victims returns the tier above tier i if tier i takes its victims, or nil.
func victims(list []TierConfig, i int) tiers.Victims {
	if i == 0 || list[i].Admit != engine.AdmitEvicted {
		return nil
	}
	v, _ := list[i-1].Tier.(tiers.Victims)
	return v
}

// Bell wakes the Stack's workers when the engine has chunks to write to a tier, loans to return to
// peers, or chunks to copy from peers. Its Ring is the engine's engine.Config.Wake.
type Bell struct {
	tiers   [engine.MaxTiers]chan struct{}
	returns chan struct{}
	copies  chan struct{}
}

// NewBell makes a Bell.
func NewBell() *Bell {
	b := &Bell{returns: make(chan struct{}, 1), copies: make(chan struct{}, 1)}
	for i := range b.tiers {
		b.tiers[i] = make(chan struct{}, 1)
	}
	return b
}

// Ring wakes the worker of a kind of work. It never blocks.
func (b *Bell) Ring(w engine.Work) {
	switch w {
	case engine.WorkReturns:
		ring(b.returns)
	case engine.WorkCopies:
		ring(b.copies)
	default:
		ring(b.tiers[w])
	}
}

func ring(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sleep waits for d. It returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
