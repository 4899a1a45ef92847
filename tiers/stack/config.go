package stack

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Mode is which hits in tiers are promoted.
type Mode uint8

const (
	// PromoteAuto promotes what arrives before it could be computed again, as far as is known.
	PromoteAuto   Mode = iota
	PromoteAlways      // promotes all
	PromoteNever       // promotes nothing: lookups ask the arena only
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

// Op is a kind of call of a tier.
type Op uint8

const (
	OpLookup Op = iota
	OpLoad
	OpStore
)

// Config is what a Stack works with. Engine, Arena and, if there are tiers or peers, Bell are
// required; other zero fields take the stated default.
type Config struct {
	// Engine is told of the tiers by [Admissions] and of the Bell by [Bell.Ring], when it is made.
	Engine *engine.Engine
	Bell   *Bell
	// Arena is the memory of a region, for its whole length.
	Arena func(region uint32) []byte
	// Log gets a line when a breaker opens or closes, and when a chunk has rotted. Default:
	// nothing.
	Log *zap.Logger
	// Promote is which hits in tiers are worth their time. Default PromoteAuto.
	Promote Mode
	// LookupDeadline bounds how long a lookup waits, even if the asker allows more. Default 3 s.
	LookupDeadline time.Duration
	// MaxPending bounds the lookups under way, and MaxPendingBytes the digests that they hold. The
	// answer to one more is what the arena holds. Defaults 1,024 and 64 MiB.
	MaxPending      int
	MaxPendingBytes int64
	// LongChunks is how many chunks of a lookup its caller walks. The walker walks the rest, in
	// turns. Default 512, which takes some 100 µs.
	LongChunks int
	// BounceBytes is the size of the buffer for chunks on their way from one tier to another, at
	// least one chunk. Each such tier has one, and each Move. Default 64 MiB.
	BounceBytes int64
	// Verify, if given, checks the bytes of restored chunks, in their order, and reports each to
	// the engine (engine.Engine.EndVerify) before it returns. It may be called by several
	// goroutines, but not for the same chunk at the same time. It must not call the Stack. ctx ends
	// with the Stack. Default: no chunk needs it.
	Verify func(ctx context.Context, chunks []engine.Verification)
	// PatrolBytes bounds how many bytes of the arena are read in a second, to find chunks that have
	// changed since they were committed. 0: none are read, and chunks are not checked before they
	// are written to a tier.
	PatrolBytes int64
	// PatrolEvery is how long one walk over the arena takes at least. Default 10 min.
	PatrolEvery time.Duration
	// Recheck, if given, compares a chunk with a checksum kept elsewhere. known reports whether
	// there is one. An error that wraps tiers.ErrCorrupt means that the chunk has changed, any
	// other that it cannot be read. Nobody has a lease on the chunk. Default: the engine has the
	// checksums (engine.Config.Sums).
	Recheck func(v *engine.Verification) (known bool, err error)
	// Peers, if given, leases chunks of other sidecars, and is asked before all tiers. The engine
	// must have ForeignSlots, and Bell.Ring for its Wake. Its CopyAfter sets what is copied into
	// the arena. Default: there are none.
	Peers Peers
	// Linger is how long a chunk that was leased from a peer is kept when nobody uses it. Default 2
	// s.
	Linger time.Duration
	// BorrowTimeout bounds one call of Peers.Borrow. Default 1 s.
	BorrowTimeout time.Duration
	// Forget, if given, makes sure that what was dropped from the arena is not restored. Clear,
	// Drop and Move call it before they return. They return its error as the arena's. Default:
	// nothing is restored.
	Forget func() error
	// Observe, if given, is called for each chunk loaded or stored without error, with its bytes,
	// and for each lookup of a tier. took is the time since the call of the tier began. It is
	// called by any goroutine and must not block.
	Observe func(tier int, op Op, bytes int64, took time.Duration)
	// Tiers are the tiers, nearest first. The Stack does not close them.
	Tiers []TierConfig
}

// TierConfig is one tier, and how it is used.
type TierConfig struct {
	Name  string // unique, not "arena"
	Tier  tiers.Tier
	Admit engine.Admission // what is written to it
	// Queue is how many chunks may wait to be written to it. Default as in engine.TierAdmission.
	Queue int

	LookupWorkers int           // lookups of it at one time, if it is not Local. Default 4
	LoadWorkers   int           // calls of Load at one time. Default 2
	StoreWorkers  int           // calls of Store at one time. Default 2
	Batch         int           // chunks of one call, at most. Default 16
	LookupTimeout time.Duration // Default 500 ms
	LoadTimeout   time.Duration // of one call. Default 2 s
	StoreTimeout  time.Duration // of one call. Default 30 s
	// Failures is how many calls in a row fail before the breaker opens. Default 3.
	Failures int
}

// arenaName is the arena's name where tiers are named.
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

// Admissions is what an engine is to be told of tiers. One that admits what is evicted from a tier
// above that names its victims gets that from there, not from the arena.
func Admissions(list []TierConfig) []engine.TierAdmission {
	out := make([]engine.TierAdmission, len(list))
	for i, t := range list {
		out[i] = engine.TierAdmission{Admit: t.Admit, Queue: t.Queue}
		if victims(list, i) != nil {
			out[i].Admit = engine.AdmitNever
		}
	}
	return out
}

// victims returns the tier above tier i if tier i gets its victims, or nil.
func victims(list []TierConfig, i int) tiers.Victims {
	if i == 0 || list[i].Admit != engine.AdmitEvicted {
		return nil
	}
	v, _ := list[i-1].Tier.(tiers.Victims)
	return v
}

// Bell is how the engine says that a tier has something to be written, or that something is to be
// returned to peers, or copied from them: give Ring to it as engine.Config.Wake.
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

// Ring wakes who does a kind of work. It never blocks.
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
