package tiers

// PromotionRoom is how many chunks an owner's lookups could be granted or lease now, in PreparePromotion, and how many they could if nobody else used
// anything: what a promotion that wants more may as well not wait for. It is an estimate: a slot that nobody uses may still be no victim.
func (e *Engine) PromotionRoom(o Owner) (now, most int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ow, err := e.owner(o)
	if err != nil {
		return 0, 0, err
	}
	c := ow.space.class
	idle, all := c.uncarved, c.uncarved
	for _, r := range c.regions {
		if !r.draining {
			idle += len(r.slots) - r.filling - r.leased
			all += len(r.slots)
		}
	}
	now = max(0, min(c.promotable-c.promoting, c.limit-ow.slots.n, idle))
	return now, min(c.promotable, c.limit, all), nil
}
