package peer

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"

	"go.uber.org/zap"

	"lookaside/internal/unshared"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// declared is what is known of a space. It is immutable.
type declared struct {
	fp     tiers.Fingerprint
	g      tiers.Geometry // PageTokens 0: not known
	fields []wire.Field   // sorted by key; empty: not known
}

// Difference is one field in which two spaces differ.
type Difference = unshared.Difference

// DeclareSpace records what the worker of a space declared, for peers and Status. Users can then
// see why two spaces do not share.
func (p *Peers) DeclareSpace(s *tiers.Space, fields []wire.Field) {
	d := &declared{fp: s.Fingerprint, g: s.Geometry, fields: slices.Clone(fields)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if was := p.spaces[d.fp]; p.ctx.Err() != nil || was != nil && was.g == d.g &&
		slices.Equal(was.fields, d.fields) {
		return
	}
	if len(p.spaces) == maxSpaces/2 { // it was most likely closed long ago
		for fp := range p.spaces {
			delete(p.spaces, fp)
			break
		}
	}
	p.spaces[d.fp] = d
	for _, b := range p.allPeers() {
		b.explain(d)
	}
	p.wakeLenders()
}

// differences returns the fields in which two spaces differ.
func differences(ours, theirs *declared) []Difference {
	return unshared.Differences(ours.declaration(), theirs.declaration())
}

func (d *declared) declaration() *unshared.Space {
	return &unshared.Space{
		PageTokens: int64(d.g.PageTokens), PageBytes: d.g.PageBytes,
		PagesPerChunk: int64(d.g.PagesPerChunk), DigestBytes: int64(d.g.DigestBytes),
		Fields: d.fields,
	}
}

// Accident is a pair of spaces, one of ours and one of a lender's, that differ only in settings
// that users get wrong by accident.
type Accident struct {
	Ours, Theirs tiers.Fingerprint
	PID          int32 // the lender's
	Causes       []unshared.Cause
}

// Accidents returns our spaces that share nothing with a lender for a reason that users hardly
// intend.
func (p *Peers) Accidents() []Accident {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Accident
	for _, b := range p.allPeers() {
		for fp, ours := range p.spaces {
			if b.spaces[fp] != nil || len(ours.fields) == 0 {
				continue
			}
			for _, theirs := range b.spaces {
				if len(theirs.fields) == 0 {
					continue
				}
				if causes := unshared.Accident(differences(ours, theirs)); causes != nil {
					out = append(out, Accident{fp, theirs.fp, b.conn.Peer().PID, causes})
				}
			}
		}
	}
	return out
}

// closest returns the lender's space that differs least from ours. It returns nil if the lender has
// the same space, or none that is known well enough. The caller holds p.mu.
func (b *borrower) closest(ours *declared) (*declared, []Difference) {
	if b.spaces[ours.fp] != nil {
		return nil, nil
	}
	var best *declared
	var least []Difference
	for _, d := range b.spaces {
		if len(d.fields) == 0 {
			continue
		}
		if diff := differences(ours, d); best == nil || len(diff) < len(least) ||
			len(diff) == len(least) && d.fp.String() < best.fp.String() {
			best, least = d, diff
		}
	}
	return best, least
}

// rankField reports whether spaces of one model differ in this field by design.
func rankField(name string) bool {
	return slices.Contains([]string{"rank", "tp_shard", "pp_rank", "layers"}, name)
}

// explain logs once why a space of ours shares nothing with a lender that has a similar one. The
// caller holds p.mu.
func (b *borrower) explain(ours *declared) {
	if len(ours.fields) == 0 {
		return
	}
	theirs, diff := b.closest(ours)
	if theirs == nil || len(diff) == 0 || b.explained[ours.fp] == theirs.fp ||
		slices.ContainsFunc(diff, func(d Difference) bool { return rankField(d.Field) }) {
		return
	}
	b.explained[ours.fp] = theirs.fp
	fields := make([]string, 0, len(diff))
	for _, d := range diff {
		fields = append(fields, d.Field+": ours "+strconv.Quote(d.Ours)+", the peer's "+
			strconv.Quote(d.Theirs))
	}
	b.log.Info("nothing is shared with a sidecar that has another space: these fields differ",
		zap.String("ours", ours.fp.Short()), zap.String("peers", theirs.fp.Short()),
		zap.Strings("fields", fields))
}

// randomID returns a random number other than 0.
func randomID() uint64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		if id := binary.LittleEndian.Uint64(b[:]); id != 0 && bits.OnesCount64(id) != 64 {
			return id
		}
	}
}
