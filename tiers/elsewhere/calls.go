package elsewhere

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// Item is a key, and the memory of its value: the slices, one behind the other. There are 1 to 8,
// none empty.
type Item struct {
	Key []byte // 1 to 255 bytes
	Mem [][]byte
}

// maxCallBytes bounds the items of one message. The rest of a packet is for what is around them.
const maxCallBytes = wire.MaxPacketBytes - 4096

// itemBytes is at most what an item takes in a message: a head, its key, and its pieces.
func (i *Item) itemBytes() int { return 8 + len(i.Key) + 25*len(i.Mem) }

// begin starts a call of the Program. It returns the connection, and a context that ends with ctx
// or with Close. The caller must call end.
func (p *Program) begin(ctx context.Context, wait bool) (c *conn, both context.Context,
	end func(), err error) {
	if err := p.enter(); err != nil {
		return nil, nil, nil, err
	}
	both, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(errClosed) })
	end = func() {
		stop()
		cancel(nil)
		p.calls.Done()
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	} else {
		c, err = p.current(both, wait)
	}
	if err != nil {
		end()
		return nil, nil, nil, err
	}
	return c, both, end, nil
}

// Contains sets held[i] if the program has keys[i]. It fails if the program cannot be used now.
func (p *Program) Contains(ctx context.Context, keys [][]byte, held []bool) error {
	clear(held)
	return p.ask(ctx, keys, func(id uint64, keys [][]byte) wire.Message {
		return &wire.TierContains{ID: id, Keys: keys}
	}, func(i int, status uint8) { held[i] = status == wire.TierOK })
}

// Drop has the program forget keys; missing ones are no error. It waits for a program that is being
// started.
func (p *Program) Drop(ctx context.Context, keys [][]byte) error {
	return p.ask(ctx, keys, func(id uint64, keys [][]byte) wire.Message {
		return &wire.TierDrop{ID: id, Keys: keys}
	}, func(int, uint8) {})
}

// ask makes calls about keys. result is called for each key that did not fail.
func (p *Program) ask(ctx context.Context, keys [][]byte,
	message func(id uint64, keys [][]byte) wire.Message, result func(i int, status uint8)) error {
	c, ctx, end, err := p.begin(ctx, false)
	if err != nil {
		return err
	}
	defer end()
	for from := 0; from < len(keys); {
		to, size := from, 0
		for ; to < len(keys) && to-from < c.maxItems; to++ {
			if size += len(keys[to]) + 3; size > maxCallBytes {
				break
			}
		}
		if err := c.ask(ctx, keys[from:to], message,
			func(i int, status uint8) { result(from+i, status) }); err != nil {
			return err
		}
		from = to
	}
	return nil
}

func (c *conn) ask(ctx context.Context, keys [][]byte,
	message func(id uint64, keys [][]byte) wire.Message, result func(i int, status uint8)) error {
	o := &call{items: len(keys)}
	if err := c.begin(ctx, o); err != nil {
		return err
	}
	if err := c.send(message(o.id, keys)); err != nil {
		return err
	}
	var failed error
	for open := len(keys); open > 0; {
		if err := c.await(ctx, o); err != nil {
			return err
		}
		results, text := c.take(o)
		open -= len(results)
		for _, r := range results {
			switch r.Status {
			case wire.TierOK, wire.TierMissing:
				result(int(r.Index), r.Status)
			default:
				failed = programError(text)
			}
		}
	}
	return failed
}

// await waits for news of a call without memory. Nobody waits for the call after an error.
func (c *conn) await(ctx context.Context, o *call) error {
	select {
	case <-o.bell:
		return nil
	case <-c.ended:
		return c.down()
	case <-ctx.Done():
		_ = c.send(&wire.TierCancel{ID: o.id})
		return context.Cause(ctx)
	}
}

// take returns the results of a call that are new, and what explains failures.
func (c *conn) take(o *call) ([]wire.TierResult, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	results := o.results
	o.results = nil
	return results, o.text
}

func programError(text string) error {
	if text == "" {
		text = "without a reason"
	}
	return fmt.Errorf("the program fails: %s", text)
}

// Clear has the program forget all keys that begin with prefix, and returns how many there were.
func (p *Program) Clear(ctx context.Context, prefix []byte) (keys int, err error) {
	c, ctx, end, err := p.begin(ctx, true)
	if err != nil {
		return 0, err
	}
	defer end()
	o := &call{items: 1, clears: true}
	if err := c.begin(ctx, o); err != nil {
		return 0, err
	}
	if err := c.send(&wire.TierClear{ID: o.id, Prefix: prefix}); err != nil {
		return 0, err
	}
	if err := c.await(ctx, o); err != nil {
		return 0, err
	}
	if o.cleared.Error != "" {
		return 0, programError(o.cleared.Error)
	}
	return int(min(o.cleared.Keys, 1<<62)), nil
}

// figure asks for figures, at most for StatsTimeout. It takes no turn: a program that is busy with
// as many calls as it wants must not count as silent.
func (c *conn) figure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.p.o.StatsTimeout)
	defer cancel()
	o := &call{items: 1, figured: true}
	if err := c.enter(o); err != nil {
		return err
	}
	if err := c.send(&wire.TierStats{ID: o.id}); err != nil {
		return err
	}
	if err := c.await(ctx, o); err != nil {
		return err
	}
	if o.figures.Problem != "" {
		return programError(o.figures.Problem)
	}
	return nil
}

// Put has the program store values. It calls done once for each item before it returns: with nil
// once the value is as durable as the program makes it. tiers.ErrBusy: there is no room. It waits
// for a program that is being started. After an error the program may still read the memory.
func (p *Program) Put(ctx context.Context, items []Item, done func(i int, err error)) {
	p.transfer(ctx, false, items, done)
}

// Get fills items' memory with the beginnings of their values. It calls done once for each item
// before it returns. tiers.ErrNotFound: there is no such key. After an error the memory is
// undefined, and the program does not touch it any more.
//
// Get may return later than ctx ends: by CancelTimeout, or by as long as a program that listens
// takes to leave (see the package comment).
func (p *Program) Get(ctx context.Context, items []Item, done func(i int, err error)) {
	p.transfer(ctx, true, items, done)
}

func (p *Program) transfer(ctx context.Context, get bool, items []Item,
	done func(i int, err error)) {
	c, ctx, end, err := p.begin(ctx, !get)
	if err != nil {
		for i := range items {
			done(i, err)
		}
		return
	}
	defer end()
	for from := 0; from < len(items); {
		to, size := from, 0
		for ; to < len(items) && to-from < c.maxItems; to++ {
			if size += items[to].itemBytes(); size > maxCallBytes {
				break
			}
		}
		t := transfer{c: c, get: get, items: items[from:to],
			done: func(i int, err error) { done(from+i, err) }}
		t.run(ctx)
		from = to
	}
}

// transfer is one call of put or get.
type transfer struct {
	c     *conn
	get   bool
	items []Item
	done  func(i int, err error)

	at   []int // by item of the message: its place in items
	wire []wire.TierItem
	held [][]bounced // by item of the message: its scratch memory
	ends []bool      // by item of the message: done was called
}

// bounced is scratch memory in place of an item's.
type bounced struct {
	span span
	mem  []byte
}

func (t *transfer) run(ctx context.Context) {
	if ctx.Err() != nil {
		for i := range t.items {
			t.done(i, context.Cause(ctx))
		}
		return
	}
	for i := range t.items {
		if err := t.place(ctx, i); err != nil {
			t.done(i, err)
		}
	}
	if len(t.wire) == 0 {
		return
	}
	t.ends = make([]bool, len(t.wire))
	o := &call{items: len(t.wire)}
	err := t.c.begin(ctx, o)
	if err == nil {
		if t.get {
			err = t.c.send(&wire.TierGet{ID: o.id, Items: t.wire})
		} else {
			err = t.c.send(&wire.TierPut{ID: o.id, Items: t.wire})
		}
	}
	if err != nil { // the program has not received it
		for i := range t.wire {
			t.giveBack(i)
			t.end(i, err)
		}
		return
	}
	t.wait(ctx, o)
}

// place finds the memory of an item in regions, and takes scratch memory for the rest.
func (t *transfer) place(ctx context.Context, i int) (err error) {
	item := &t.items[i]
	w := wire.TierItem{Key: item.Key, Pieces: make([]wire.TierPiece, 0, len(item.Mem))}
	var held []bounced
	defer func() {
		if err != nil {
			for _, b := range held {
				t.c.p.scratch.give(b.span)
			}
		}
	}()
	for _, mem := range item.Mem {
		piece, ok := t.c.find(mem)
		if !ok {
			sp, err := t.c.p.scratch.take(ctx, int64(len(mem)))
			if err != nil {
				return err
			}
			held = append(held, bounced{sp, mem})
			if piece, ok = t.c.find(sp.bytes()[:len(mem)]); !ok {
				return errors.New("the program has not mapped the scratch memory")
			}
			if !t.get {
				copy(sp.bytes(), mem)
			}
		}
		w.Pieces = append(w.Pieces, piece)
	}
	t.at, t.wire, t.held = append(t.at, i), append(t.wire, w), append(t.held, held)
	return nil
}

// end reports item i of the message.
func (t *transfer) end(i int, err error) {
	t.ends[i] = true
	t.done(t.at[i], err)
}

// giveBack gives the scratch memory of an item back, which the program does not touch any more.
func (t *transfer) giveBack(i int) {
	for _, b := range t.held[i] {
		t.c.p.scratch.give(b.span)
	}
}

// wait waits until the program touches none of the items' memory any more.
func (t *transfer) wait(ctx context.Context, o *call) {
	c := t.c
	open := len(t.wire)
	cancelled := ctx.Done()
	ended := c.ended
	var late error // why nobody waits for the call any more
	var grace <-chan time.Time
	for open > 0 {
		select {
		case <-o.bell:
		case <-cancelled:
			cancelled, late = nil, context.Cause(ctx)
			_ = c.send(&wire.TierCancel{ID: o.id})
			timer := time.NewTimer(c.p.o.CancelTimeout)
			defer timer.Stop()
			grace = timer.C
			continue
		case <-grace:
			grace = nil
			c.fail(errHung)
			continue
		case <-ended:
			ended = nil
		case <-c.free:
			ended = nil
		}
		results, text := c.take(o)
		open -= len(results)
		for _, r := range results {
			t.finish(int(r.Index), r.Status, text, late)
		}
		if ended == nil && open > 0 {
			t.lost(late)
			return
		}
	}
}

// finish ends an item that the program has reported.
func (t *transfer) finish(i int, status uint8, text string, late error) {
	var err error
	switch {
	case status == wire.TierOK:
		if t.get {
			for _, b := range t.held[i] {
				copy(b.mem, b.span.bytes())
			}
		}
	case status == wire.TierMissing && t.get:
		err = tiers.ErrNotFound
	case status == wire.TierNoRoom && !t.get:
		err = fmt.Errorf("%w: the program has no room", tiers.ErrBusy)
	case late != nil:
		err = late
	case status == wire.TierCancelled:
		err = errors.New("the program gives a call up that was not cancelled")
	default:
		err = programError(text)
	}
	t.giveBack(i)
	t.end(i, err)
}

// lost ends the items that are left of a call whose connection has failed. Those that the program
// may still write to, beside scratch memory, end when it cannot any more.
func (t *transfer) lost(late error) {
	c := t.c
	if late == nil {
		late = c.down()
	}
	left := make([]int, 0, len(t.wire))
	for i := range t.wire {
		if t.ends[i] {
			continue
		}
		c.leave(t.held[i])
		if t.get && len(t.held[i]) < len(t.items[t.at[i]].Mem) {
			left = append(left, i)
			continue
		}
		t.end(i, late)
	}
	if len(left) == 0 {
		return
	}
	<-c.free
	for _, i := range left {
		t.end(i, late)
	}
}

// leave has scratch memory given back when the connection is free.
func (c *conn) leave(held []bounced) {
	c.mu.Lock()
	gone := c.freed
	if !gone {
		for _, b := range held {
			c.left = append(c.left, b.span)
		}
	}
	c.mu.Unlock()
	if gone {
		for _, b := range held {
			c.p.scratch.give(b.span)
		}
	}
}
