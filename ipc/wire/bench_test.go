package wire

import (
	"math/rand/v2"
	"testing"
)

// hotMessages are the messages of each lookup, load and store, at the sizes that they usually have:
// chunks of 16 pages, hashes of 32 bytes. A packet of so many bytes takes the kernel some
// microseconds to carry.
func hotMessages() []named {
	prev, hashes := digests(1, 32), digests(256, 32)
	secret, names := digests(1, SecretBytes), digests(1, NamesBytes)
	return []named{
		{"Lookup/256", &Lookup{Session: 1 << 40, Secret: secret, Lookup: 1 << 20, Prev: prev,
			FirstPage: 16, Hashes: hashes, DeadlineMs: 200, RecomputeUs: 1500}},
		{"LookupResult", &LookupResult{Lookup: 1 << 20, HitPages: 256, HitTokens: 4096}},
		{"PrepareStore/256", &PrepareStore{ID: 1000, FirstPage: 16, Prev: prev, Hashes: hashes,
			Every: 1}},
		{"StoreGrant/1", &StoreGrant{ID: 1000, Store: 1 << 20, Grants: manyExtents(1)}},
		{"StoreGrant/16", &StoreGrant{ID: 1000, Store: 1 << 20, Grants: manyExtents(16)}},
		{"CommitStore", &CommitStore{Store: 1 << 20}},
		{"PrepareLoad", &PrepareLoad{ID: 1000, Session: 1 << 40, Lookup: 1 << 20,
			Ticket: secret, FirstPage: 16, Pages: 256, Names: names}},
		{"LoadGrant/1", &LoadGrant{ID: 1000, Load: 1 << 20, Names: names,
			Extents: manyExtents(1)}},
		{"LoadGrant/16", &LoadGrant{ID: 1000, Load: 1 << 20, Names: names,
			Extents: manyExtents(16)}},
		{"LoadGrant/1024", &LoadGrant{ID: 1000, Load: 1 << 20, Names: names,
			Extents: manyExtents(1024)}},
		{"Release", &Release{Load: 1 << 20}},
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, h := range hotMessages() {
		b.Run(h.name, func(b *testing.B) {
			buf := h.m.Append(nil)
			b.ReportAllocs()
			for b.Loop() {
				buf = h.m.Append(buf[:0])
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, h := range hotMessages() {
		b.Run(h.name, func(b *testing.B) {
			raw, m := h.m.Append(nil), New(h.m.Type())
			b.ReportAllocs()
			for b.Loop() {
				if err := m.Decode(raw, &DefaultLimits); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDecodeAny decodes messages of every type in turn, so that no branch is learnt by heart.
func BenchmarkDecodeAny(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 0))
	var raws [][]byte
	var into []Message
	for range 4096 {
		h := hotMessages()[r.IntN(9)]
		raws, into = append(raws, h.m.Append(nil)), append(into, New(h.m.Type()))
	}
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		if i++; i == len(raws) {
			i = 0
		}
		if err := into[i].Decode(raws[i], &DefaultLimits); err != nil {
			b.Fatal(err)
		}
	}
}
