package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ImageStatus returns what the kubelet sees of an image, nil when it sees none.
// ref may be a tag, a name with a digest or an image ID.
func (c *Containerd) ImageStatus(ref string) *runtime.Image {
	c.t.Helper()
	var image *runtime.Image
	err := c.CRI(func(conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		resp, err := runtime.NewImageServiceClient(conn).ImageStatus(ctx,
			&runtime.ImageStatusRequest{Image: &runtime.ImageSpec{Image: ref}})
		image = resp.GetImage()
		return err
	})
	if err != nil {
		c.t.Fatalf("ImageStatus of %s: %v", ref, err)
	}
	return image
}

// ListImages returns all images that the kubelet sees.
func (c *Containerd) ListImages() []*runtime.Image {
	c.t.Helper()
	var list []*runtime.Image
	err := c.CRI(func(conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		resp, err := runtime.NewImageServiceClient(conn).ListImages(ctx, &runtime.ListImagesRequest{})
		list = resp.GetImages()
		return err
	})
	if err != nil {
		c.t.Fatalf("ListImages: %v", err)
	}
	return list
}

// AwaitPinned waits until the kubelet sees an image as pinned, or as not pinned.
func (c *Containerd) AwaitPinned(ref string, pinned bool) {
	c.t.Helper()
	await(c.t, fmt.Sprintf("CRI to see %s as pinned %t", ref, pinned), func() error {
		if c.ImageStatus(ref).GetPinned() != pinned {
			return errors.New("it does not")
		}
		return nil
	})
}

// RemoveImage removes an image as the kubelet does when it collects garbage.
func (c *Containerd) RemoveImage(ref string) {
	c.t.Helper()
	err := c.CRI(func(conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_, err := runtime.NewImageServiceClient(conn).RemoveImage(ctx, &runtime.RemoveImageRequest{Image: &runtime.ImageSpec{Image: ref}})
		return err
	})
	if err != nil {
		c.t.Fatalf("RemoveImage of %s: %v", ref, err)
	}
}

// CRIPull pulls an image as the kubelet does, with a pod's pull secret, and returns
// its ID.
func (c *Containerd) CRIPull(ref, user, password string) string {
	c.t.Helper()
	id := ""
	err := c.CRI(func(conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		resp, err := runtime.NewImageServiceClient(conn).PullImage(ctx, &runtime.PullImageRequest{
			Image: &runtime.ImageSpec{Image: ref}, Auth: &runtime.AuthConfig{Username: user, Password: password},
		})
		id = resp.GetImageRef()
		return err
	})
	if err != nil {
		c.t.Fatalf("PullImage of %s: %v", ref, err)
	}
	return id
}

// LoadPause puts the sandbox image on the node, as it is there before the first
// pod. It goes through the registry, where it is public.
func (c *Containerd) LoadPause(m *Images, r *Registry) {
	c.t.Helper()
	client := c.Client()
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), "k8s.io"), limit)
	defer cancel()
	ref := r.Push(m, m.Image(m.Layer(Hello(c.t))), "public/pause:1")
	img, err := client.Pull(ctx, ref, containerd.WithPullUnpack, containerd.WithResolver(r.resolver()))
	if err != nil {
		c.t.Fatalf("loading the pause image: %v", err)
	}
	if _, err := client.ImageService().Create(ctx, images.Image{Name: PauseImage, Target: img.Target()}); err != nil {
		c.t.Fatalf("naming the pause image: %v", err)
	}
	await(c.t, "CRI to see the pause image", func() error {
		if c.ImageStatus(PauseImage) == nil {
			return errors.New("it is not listed")
		}
		return nil
	})
}

// RunContainer starts a pod on the host's network with one container of an
// image that is on the node, without pulling, waits until the container has
// written want to its log, and removes the pod. It returns the log.
func (c *Containerd) RunContainer(image, want string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	logs := filepath.Join(c.dir, "pod-logs")
	var text string
	err := c.CRI(func(conn *grpc.ClientConn) error {
		cri := runtime.NewRuntimeServiceClient(conn)
		sandbox := &runtime.PodSandboxConfig{
			Metadata:     &runtime.PodSandboxMetadata{Name: "kernel", Uid: "kernel", Namespace: "default"},
			LogDirectory: logs,
			Linux: &runtime.LinuxPodSandboxConfig{
				CgroupParent: "/" + cgroupParent(),
				SecurityContext: &runtime.LinuxSandboxSecurityContext{
					NamespaceOptions: &runtime.NamespaceOption{Network: runtime.NamespaceMode_NODE},
				},
			},
		}
		pod, err := cri.RunPodSandbox(ctx, &runtime.RunPodSandboxRequest{Config: sandbox})
		if err != nil {
			return err
		}
		cleanup(c.t, func() { c.removePod(pod.PodSandboxId) })
		defer c.removePod(pod.PodSandboxId)
		created, err := cri.CreateContainer(ctx, &runtime.CreateContainerRequest{
			PodSandboxId:  pod.PodSandboxId,
			SandboxConfig: sandbox,
			Config: &runtime.ContainerConfig{
				Metadata: &runtime.ContainerMetadata{Name: "kernel"},
				Image:    &runtime.ImageSpec{Image: image},
				LogPath:  "kernel.log",
				Linux:    &runtime.LinuxContainerConfig{},
			},
		})
		if err != nil {
			return err
		}
		if _, err := cri.StartContainer(ctx, &runtime.StartContainerRequest{ContainerId: created.ContainerId}); err != nil {
			return err
		}
		await(c.t, "the container's log", func() error {
			b, err := os.ReadFile(filepath.Join(logs, "kernel.log"))
			text = string(b)
			if err == nil && !strings.Contains(text, want) {
				err = errors.New("it does not hold what was expected: " + text)
			}
			return err
		})
		return nil
	})
	if err != nil {
		c.t.Fatalf("running a container of %s: %v", image, err)
	}
	return text
}

// removePod removes a pod and then the control groups that its containers were
// in: runc leaves the parent.
func (c *Containerd) removePod(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := c.CRI(func(conn *grpc.ClientConn) error {
		cri := runtime.NewRuntimeServiceClient(conn)
		if _, err := cri.StopPodSandbox(ctx, &runtime.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
			return err
		}
		_, err := cri.RemovePodSandbox(ctx, &runtime.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	})
	if err != nil {
		c.t.Logf("removing the pod: %v", err)
	}
	removeCgroups()
}
