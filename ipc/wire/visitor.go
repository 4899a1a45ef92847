package wire

import "math"

// A visitor walks the fields of one message, either to write them or to read them. A message lists
// its fields once, by a call for each; what the call does depends on the direction.
//
// The number of fields is not declared anywhere: the visitor counts the calls. When writing, the
// count goes into the array's header at the end. When reading, the count must equal the header's.
//
// A visitor never escapes to the heap: nothing here may keep it or pass it through an interface.
// TestHotMessagesDoNotAllocate holds that.
//
// The hot messages have no functions by hand either. By BenchmarkAppend and BenchmarkDecode those
// would save 8 to 40 ns a message, and a socket takes microseconds to carry one.
type visitor struct {
	reader           // buf is what is read, or what has been written
	lim      *Limits // what is accepted when reading
	reading  bool
	start    int // when writing: where the array's header is in buf
	declared int // when reading: the number of fields by the array's header
	fields   int // visited so far, the type included
}

func write(dst []byte) *visitor {
	return &visitor{reader: reader{buf: dst}, lim: &DefaultLimits}
}

func read(b []byte, lim *Limits) *visitor {
	return &visitor{reader: reader{buf: b}, lim: lim, reading: true}
}

// begin visits the array's header and the type.
func (v *visitor) begin(t Type) {
	v.of, v.fields = t, 1
	if v.reading {
		v.declared = v.array("", maxFields)
		if got := v.uint("type", math.MaxUint8); v.err == nil && Type(got) != t {
			v.fail("type", "another message")
		}
		return
	}
	v.start = len(v.buf)
	v.buf = appendUint(append(v.buf, 0x90), uint64(t))
}

// bytes ends writing and returns the message.
func (v *visitor) bytes() []byte {
	v.buf[v.start] |= byte(v.fields)
	return v.buf
}

// done ends reading and returns the first error.
func (v *visitor) done() error {
	if v.fields != v.declared {
		v.fail("", "wrong number of fields")
	}
	return v.end()
}

// check refuses what was read unless ok. It has no effect when writing. The values that ok is
// computed from are undefined after an error.
func (v *visitor) check(ok bool, field, reason string) {
	if !ok && v.reading {
		v.fail(field, reason)
	}
}

// version visits the protocol version, which is written as [Version] when 0. Another version is
// reported before anything behind it is judged, the number of fields included: it may mean
// something else there.
func (v *visitor) version(p *uint16) { v.versionOf(p, Version) }

// versionOf is version for a protocol of the given version.
func (v *visitor) versionOf(p *uint16, want uint64) {
	n := uint64(*p)
	if n == 0 {
		n = want
	}
	v.u64("version", &n)
	if v.reading && v.err == nil && n != want {
		v.err, v.pos = &VersionError{Got: n, Want: want}, len(v.buf)
	}
	if v.reading {
		*p = uint16(n)
	}
}

// number visits an integer that is not a field of its own.
func (v *visitor) number(field string, p *uint32) {
	if v.reading {
		*p = v.n32(field)
	} else {
		v.buf = appendUint(v.buf, uint64(*p))
	}
}

func (v *visitor) u32(field string, p *uint32) {
	v.fields++
	v.number(field, p)
}

// count visits a u32 that must not be 0.
func (v *visitor) count(field string, p *uint32) {
	v.u32(field, p)
	v.check(*p != 0, field, "zero")
}

// atLeastOne visits a count that is written as 1 when 0.
func (v *visitor) atLeastOne(field string, p *uint32) {
	n := max(1, *p)
	v.count(field, &n)
	if v.reading {
		*p = n
	}
}

// u8 visits an integer of at most limit.
func (v *visitor) u8(field string, p *uint8, limit uint8) {
	n := uint64(*p)
	v.upTo(uint64(limit), field, &n)
	if v.reading {
		*p = uint8(n)
	}
}

func (v *visitor) u64(field string, p *uint64) { v.upTo(math.MaxUint64, field, p) }

// size visits an integer below 2^63: a length or an offset.
func (v *visitor) size(field string, p *uint64) { v.upTo(math.MaxInt64, field, p) }

// upTo visits an integer. When reading it must not be above limit.
func (v *visitor) upTo(limit uint64, field string, p *uint64) {
	v.fields++
	if v.reading {
		*p = v.uint(field, limit)
	} else {
		v.buf = appendUint(v.buf, *p)
	}
}

// id visits a handle, which must not be 0, the value for "none".
func (v *visitor) id(field string, p *uint64) {
	v.u64(field, p)
	v.check(*p != 0, field, "zero")
}

// digest visits the length of a page hash.
func (v *visitor) digest(p *uint8) {
	v.u8("digest_bytes", p, MaxDigestBytes)
	v.check(*p != 0, "digest_bytes", "zero")
}

// flag visits a bool, which is 0 or 1.
func (v *visitor) flag(field string, p *bool) {
	v.fields++
	v.bit(field, p)
}

// bit visits a bool that is not a field of its own.
func (v *visitor) bit(field string, p *bool) {
	if v.reading {
		*p = v.uint(field, 1) == 1
	} else if *p {
		v.buf = append(v.buf, 1)
	} else {
		v.buf = append(v.buf, 0)
	}
}

// str visits a string of at most limit bytes.
func (v *visitor) str(field string, p *string, limit int) {
	v.fields++
	v.text(field, p, limit)
}

// text visits a string that is not a field of its own.
func (v *visitor) text(field string, p *string, limit int) {
	if v.reading {
		*p = string(v.strBytes(field, limit))
	} else {
		v.buf = appendStr(v.buf, *p)
	}
}

// tenant visits a tenant's name, which aliases the input when read.
func (v *visitor) tenant(p *Label) { v.label("tenant", p, MaxTenantBytes) }

// label visits a label of at most limit bytes, which aliases the input when read.
func (v *visitor) label(field string, p *Label, limit int) {
	v.fields++
	if v.reading {
		*p = v.strBytes(field, limit)
	} else {
		v.buf = appendStr(v.buf, *p)
	}
}

// clipped visits a text for people, which is cut to its limit when written.
func (v *visitor) clipped(field string, p *string) {
	if v.reading {
		v.str(field, p, v.lim.TextBytes)
	} else {
		v.fields++
		v.buf = appendStr(v.buf, clip(*p, v.lim.TextBytes))
	}
}

// bin visits a byte string of at most limit bytes, which aliases the input when read.
func (v *visitor) bin(field string, p *[]byte, limit int) {
	v.fields++
	v.run(field, p, limit)
}

// run visits a byte string that is not a field of its own.
func (v *visitor) run(field string, p *[]byte, limit int) {
	if v.reading {
		*p = v.binBytes(field, limit)
	} else {
		v.buf = appendBin(v.buf, *p)
	}
}

// exactly visits a byte string of n bytes.
func (v *visitor) exactly(field string, p *[]byte, n int) {
	v.bin(field, p, n)
	v.check(len(*p) == n, field, "wrong length")
}

// pages visits consecutive pages of a prefix: the index of the first, the hash of the page before
// it, and their packed hashes.
func (v *visitor) pages(first *uint32, prev, hashes *[]byte) {
	v.u32("first_page", first)
	v.bin("prev", prev, MaxDigestBytes)
	v.bin("hashes", hashes, v.lim.Pages*MaxDigestBytes)
	v.check(len(*hashes) != 0, "hashes", "empty")
	v.check(*first != 0 || len(*prev) == 0, "prev",
		"must be empty for the first page of a prefix")
	v.check(len(*prev) == 0 || len(*hashes)%len(*prev) == 0, "hashes", "not whole hashes")
	v.check(uint64(*first)+uint64(len(*hashes)) <= math.MaxUint32, "first_page", "out of range")
}

// list visits the header of a list and returns how many elements follow. When reading, it empties
// the list.
func list[E any](v *visitor, field string, p *[]E, limit int) int {
	v.fields++
	if !v.reading {
		v.buf = appendArray(v.buf, len(*p))
		return len(*p)
	}
	*p = (*p)[:0]
	return v.array(field, limit)
}

// element returns the next element of a list, its i-th, to be visited. When reading, it appends one
// first, so that a list grows only as its bytes are read.
func element[E any](v *visitor, p *[]E, i int) *E {
	if v.reading {
		var e E
		*p = append(*p, e)
	}
	return &(*p)[i]
}

// tuple visits the header of an element that has n parts.
func (v *visitor) tuple(field string, n int) {
	if !v.reading {
		v.buf = append(v.buf, 0x90|byte(n))
	} else if v.pos < len(v.buf) && v.buf[v.pos] == 0x90|byte(n) { // the form that we send
		v.pos++
	} else if v.array(field, n) != n {
		v.fail(field, "an element has another number of parts")
	}
}

// extents visits the extents of a grant. A grant may have thousands, so both directions are by
// hand: to write an extent by number takes 15 ns, and by the loop here 5.
func (v *visitor) extents(field string, p *[]Extent) {
	n := list(v, field, p, v.lim.Extents)
	if !v.reading {
		dst, extents := v.buf, *p
		for i := range extents {
			e := &extents[i]
			dst = appendUint(append(dst, 0x94), uint64(e.Page))
			dst = appendUint(dst, uint64(e.Pages))
			dst = appendUint(dst, uint64(e.Region))
			dst = appendUint(dst, e.Offset)
		}
		v.buf = dst
		return
	}
	for i := 0; i < n && v.err == nil; i++ {
		v.tuple(field, 4)
		e := Extent{Page: v.n32(field), Pages: v.n32(field), Region: v.n32(field),
			Offset: v.uint(field, math.MaxInt64)}
		v.check(e.Pages != 0 && uint64(e.Page)+uint64(e.Pages) <= math.MaxUint32, field,
			"pages out of range")
		*p = append(*p, e)
	}
}

// indices visits rising indices of extents.
func (v *visitor) indices(field string, p *[]uint32) {
	n := list(v, field, p, v.lim.Extents)
	for i := 0; i < n && v.err == nil; i++ {
		v.number(field, element(v, p, i))
		v.check(i == 0 || (*p)[i] > (*p)[i-1], field, "not in rising order")
	}
}

// runs visits a list of runs of pages.
func (v *visitor) runs(field string, p *[]Run) {
	n := list(v, field, p, v.lim.Pages)
	for i := 0; i < n && v.err == nil; i++ {
		r := element(v, p, i)
		v.tuple(field, 2)
		v.bit(field, &r.Removed)
		v.run(field, &r.Hashes, MaxPacketBytes)
		v.check(len(r.Hashes) != 0, field, "empty")
	}
}

// named visits at most so many named properties: a map by rising key.
func (v *visitor) named(field string, p *[]Field, most int) {
	v.fields++
	n := len(*p)
	if v.reading {
		*p = (*p)[:0]
		n = v.mapping(field, most)
	} else {
		v.buf = appendMap(v.buf, n)
	}
	for i := 0; i < n && v.err == nil; i++ {
		f := element(v, p, i)
		v.text(field, &f.Key, v.lim.FieldKeyBytes)
		v.text(field, &f.Value, v.lim.FieldValueBytes)
		v.check(i == 0 || f.Key > (*p)[i-1].Key, field, "not in rising order of keys")
	}
}
