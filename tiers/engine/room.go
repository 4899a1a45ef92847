package engine

// Room is what PreparePromotion could reserve or lease now, in chunks. It is an estimate: a slot
// that nobody uses may still be no victim.
type Room struct {
	// of the part of the slots that may be promoted into at a time: it frees itself as promotions
	// end
	Budget int
	// of the owner's share, and of the slots that nobody uses: it frees itself as leases end
	Share int
	Most  int // with all of both: what wants more may as well not wait for it
}

// PromotionRoom is the room for the lookups of an owner.
func (e *Engine) PromotionRoom(o Owner) (Room, error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return Room{}, err
	}
	c := ow.space.class
	idle, all := c.uncarved, c.uncarved
	for _, r := range c.regions {
		if !r.draining {
			idle += len(r.slots) - r.filling - r.leased
			all += len(r.slots)
		}
	}
	return Room{
		Budget: max(0, c.promotable-c.promoting),
		Share:  max(0, min(c.limit-ow.slots.n, idle, c.most-c.busy)),
		Most:   min(c.promotable, c.limit, all, c.most-c.frozen),
	}, nil
}
