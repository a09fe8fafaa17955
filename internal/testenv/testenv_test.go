package testenv

import "testing"

func TestTheRigRunsAnImageOfItsOwn(t *testing.T) {
	NeedRoot(t)
	node := StartContainerd(t, Config{})
	m := NewImages(t)
	reg := StartRegistry(t, Bearer, nil)
	node.LoadPause(m, reg)
	t.Log(node.RunContainer(PauseImage, ""))
}
